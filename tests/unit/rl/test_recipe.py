"""Recipes of reinforcement learning: every mistake is named, and --dry-run says what a run needs."""

import json
import re
from pathlib import Path

import pytest

from glm5.cli.main import main
from glm5.common.errors import ConfigError, TrainingError
from glm5.config.rl import read_rl_recipe
from glm5.rl import build
from glm5.rl.algorithms.table import PRESETS
from glm5.rl.build import PolicyBuilder
from glm5.rl.environments.guess import Guess
from glm5.rl.estimate import estimate
from glm5.rl.loop import run
from glm5.train.state import locked
from tests.support.rl_recipe import recipe_file, small_recipe

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("rl-*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(path):
    recipe = read_rl_recipe(path)
    assert recipe.name == path.stem
    is_made = any(one.name.startswith("swe/") for one in recipe.environment)
    if recipe.model.checkpoint is None and recipe.reward is None and not is_made:  # else other commands make it
        estimate(recipe)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rollots.groups=2", r"rollots: no such key; did you mean rollouts\?"),
        ("rollouts.group=2", r"rollouts\.group: no such key; did you mean groups\?"),
        ("algoritm.name=dis", r"algoritm: no such key; did you mean algorithm\?"),
        ("environment.0.nam=guess", r"environment\.0\.nam: no such key; did you mean name\?"),
        ("rollouts.quantization=fp8", r"exact: an engine with quantized weights .*; set exact = false"),
        ("rollouts.deterministic=false", r"exact: needs rollouts\.deterministic; set both, or exact = false"),
        ("rollouts.weight_channel=folders", r"rollouts\.weight_channel: got 'folders'; allowed: .*'folder' or 'delta'"),
        ("rollouts.groups=0", r"rollouts\.groups: got 0; allowed: "),
        ("lr_warmup_steps=3", r"lr_warmup_steps 3 must be below steps 3"),
        ("algorithm.critic.lr=2", r'algorithm: critic: grpo-no-std has none; leave it out, or set name = "sao"'),
        ("environment=[]", r"environment: got \[\]; allowed: "),
        ('environment=[{name="guess"},{name="guess"}]', r"two environments are called guess"),
    ],
)
def test_a_recipe_that_says_nonsense_is_refused(tmp_path, setting, said):
    with pytest.raises(ConfigError, match=rf"small\.toml: (.*: )?{said}"):
        small_recipe(tmp_path, setting)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm.name=gripo"], r"unknown algorithm: gripo; did you mean grpo\?"),
        (["algorithm.parameters.betta=2"], r"betta.*"),
        (["environment.0.name=gues"], r"no environment is called 'gues'; did you mean guess\?"),
        (["environment.0.level=1"], r"environment guess: level: got 1; allowed: 0 to 0"),
        (["environment.0.name=science", "environment.0.level=3"], r"science: level: got 3; allowed: 0 to 2"),
    ],
)
def test_what_a_recipe_names_must_exist(tmp_path, settings, said):
    recipe = small_recipe(tmp_path, *settings)
    with pytest.raises(ConfigError, match=said):
        estimate(recipe)


def test_the_critics_algorithm_is_the_one_that_has_one(tmp_path):
    assert [name for name, one in PRESETS.items() if one.advantages is None] == ["sao"]
    assert small_recipe(tmp_path, "algorithm.name=sao", "algorithm.critic.lr=2").algorithm.critic.lr == 2
    assert small_recipe(tmp_path, "algorithm.critic.lr=5").algorithm.name == "grpo-no-std"  # as --dry-run prints it


def test_two_folders_of_one_name_are_refused(tmp_path, monkeypatch):
    class Tasks(Guess):
        def __init__(self, name: str) -> None:
            self.name = f"swe/{Path(name).name}"

    monkeypatch.setattr(build, "make", Tasks)
    recipe = small_recipe(tmp_path, 'environment=[{name="swe/a/tasks"},{name="swe/b/tasks"}]')
    with pytest.raises(ConfigError, match=r"swe/a/tasks and swe/b/tasks: both call their tasks swe/tasks; .*rename"):
        estimate(recipe)
    build.environments_of(small_recipe(tmp_path, 'environment=[{name="swe/a/tasks"},{name="swe/a/others"}]'))


def test_a_dry_run_counts_every_engine_and_names_devices_that_are_not_here(tmp_path):
    def memory(said: str) -> float:
        return float(re.search(r"memory: about ([\d.]+) GiB", said)[1])  # pyright: ignore[reportOptionalSubscript]

    one = estimate(small_recipe(tmp_path, 'rollouts.devices=["cpu"]'))
    three = estimate(small_recipe(tmp_path, 'rollouts.devices=["cpu","cpu","cpu"]'))
    assert "  engine, each of 3: weights " in three
    assert memory(three) > 1.5 * memory(one)
    assert "no such device" not in one + three
    far = estimate(small_recipe(tmp_path, 'rollouts.devices=["cpu","cuda:63"]'))
    assert re.search(r"  cpu: [\d.]+ of [\d.]+\n  cuda:63: [\d.e-]+; this machine has no such device", far)
    assert "does not fit" not in far


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size 200 is too small: .* need at least \d+"):
        PolicyBuilder(small_recipe(tmp_path, "model.config.vocab_size=200"), tmp_path / "run")


def test_the_rate_rises_and_falls(tmp_path):
    recipe = small_recipe(tmp_path, "steps=11", "lr=1.0", "final_lr=0.5", "lr_warmup_steps=1")
    assert [round(recipe.lr_at(step), 3) for step in (0, 1, 5, 10)] == [0.5, 0.95, 0.75, 0.5]


def test_the_entropy_bonus_falls(tmp_path):
    recipe = small_recipe(tmp_path, "steps=11", "algorithm.entropy=0.2", "algorithm.final_entropy=0.1")
    assert [round(recipe.entropy_at(step), 3) for step in (0, 5, 10)] == [0.2, 0.15, 0.1]
    assert small_recipe(tmp_path, "algorithm.entropy=0.2").entropy_at(10) == 0.2


def test_a_dry_run_says_what_is_needed(tmp_path, capsys):
    out = tmp_path / "run"
    command = ["rl", str(recipe_file(tmp_path)), "--dry-run", "--set", f"out={out}"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "a step: 2,048 tokens at most, in 16 conversations at a time" in said
    for part in (
        "model: ",
        "memory: about ",
        "trainer: weights ",
        "engine: weights ",
        "by the speed of matrix products",
    ):
        assert part in said
    assert json.loads(said.partition("recipe:")[2])["rollouts"]["group_size"] == 4
    assert not out.exists()
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "time/step": {n}}}\n' for n in (1, 3, 2)))
    assert main(command) == 0
    assert "time: about 6 seconds, 2 s a step (the median of 3 that were measured)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("exact=false", 'trainer.devices=["cuda:0", "cpu"]'), "all must be CPUs, or all GPUs"),
        (("exact=false", 'trainer.devices=["cuda:0", "cuda:0"]'), "each GPU once"),
        (("exact=false", f"trainer.devices={json.dumps(['cpu'] * 1000)}"), "without ray at most 64"),
        (("rollouts.weight_folder=weights",), "no effect with weight_channel auto"),
        (("rollouts.weight_channel=nvlink",), "weight_channel: got 'nvlink'; allowed: .*'folder' or 'delta'"),
    ],
)
def test_processes_and_folders_that_cannot_be_are_refused(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        small_recipe(tmp_path, *settings)


def test_a_cluster_has_many_devices_of_one_name(tmp_path):
    devices = ["cuda"] * 100
    recipe = small_recipe(tmp_path, "exact=false", "ray=auto", f"trainer.devices={json.dumps(devices)}")
    assert recipe.trainer.devices == tuple(devices)


def test_a_folder_of_weights_is_of_one_run(tmp_path):
    given = "rollouts.weight_channel=folder", f"rollouts.weight_folder={tmp_path / 'weights'}"
    with locked(tmp_path / "weights"), pytest.raises(TrainingError, match=r"choose another rollouts\.weight_folder"):
        run(small_recipe(tmp_path, *given))
    (tmp_path / "file").write_text("kept")
    with pytest.raises(TrainingError, match=r"file: cannot be written .* another folder with rollouts\.weight_folder"):
        run(small_recipe(tmp_path, given[0], f"rollouts.weight_folder={tmp_path / 'file'}"))
    assert (tmp_path / "file").read_text() == "kept"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
