"""Stages are recipes that their commands read, with start and folder; a changed one is refused; shown conversations."""

import json
from pathlib import Path

import pytest

from glm5.chat.template import ChatTemplate
from glm5.common.errors import ConfigError, TrainingError
from glm5.config.post_train import read_post_train
from glm5.config.presets import preset
from glm5.config.rl import read_rl_recipe
from glm5.config.tensors import count_parameters
from glm5.config.train import read_recipe
from glm5.post_train.needs import needs_of, table_of
from glm5.post_train.plan import Plan
from glm5.train.data.pairs import pair_of
from tests.support.tokenizers import tiny_tokenizer
from tests.unit.post_train.conftest import TEXT, WITH_REWARD

TEMPLATE = ChatTemplate.bundled("glm-5.2", tiny_tokenizer())
ROOT = Path(__file__).parents[3]
RECIPES = [*sorted((ROOT / "recipes").glob("post-train-*.toml")), ROOT / "tests/data/post-train-tiny.toml"]


def test_what_is_written_is_what_the_command_reads(plan, tmp_path):
    base, rl, w4a8 = plan().stages
    for stage in (base, rl):
        stage.begin()
    assert read_recipe(base.file) == base.recipe
    assert read_rl_recipe(rl.file) == rl.recipe
    assert base.command == ["train", str(tmp_path / "run/base.toml")]
    assert rl.recipe.model.checkpoint == str(tmp_path / "run/base.checkpoint")
    assert (rl.recipe.model.dtype, rl.recipe.model.preset) == ("bfloat16", None)
    run = tmp_path / "run"
    flags = ["--scheme=w4a8", "--held-out-tokens=0", "--restart"]
    assert w4a8.command == ["quantize", str(run / "rl.checkpoint"), str(run / "w4a8"), *flags]


def test_a_stage_starts_from_the_best_checkpoint_by_a_name_that_does_not_change(plan, tmp_path):
    base, rl, _ = plan().stages
    for name in ("last", "best"):
        (tmp_path / "run/base/pretrain" / name).mkdir(parents=True)
        base.link()
        assert (tmp_path / "run/base.checkpoint").resolve() == tmp_path / "run/base/pretrain" / name
        assert plan().stages[1].table == rl.table
    base.delete()
    assert not any(tmp_path.glob("run/base*"))


def test_a_changed_recipe_of_a_begun_stage_is_refused_until_it_is_deleted(plan):
    plan().stages[1].begin()
    changed = plan(TEXT.replace("groups = 5", "groups = 6"))
    with pytest.raises(TrainingError, match=r"stage rl .*rollouts\.groups was 5 and is 6; .*--restart-from rl"):
        changed.check()
    for stage in changed.from_stage("rl"):
        stage.delete()
    changed.check()
    with pytest.raises(ConfigError, match="no stage is called 'sft'; known are base, rl, w4a8"):
        changed.from_stage("sft")


def test_what_a_command_would_refuse_is_refused_before_any_runs(plan):
    with pytest.raises(ConfigError, match=r"stage rl: rollouts\.groups: got 0; allowed: at least 1"):
        plan(TEXT.replace("groups = 5", "groups = 0"))
    with pytest.raises(ConfigError, match="stage w4a8: scheme: got 'w3'"):
        plan(TEXT.replace('scheme = "w4a8"', 'scheme = "w3"'))
    with pytest.raises(ConfigError, match="stage rl: model: got 5"):
        plan(TEXT, "stage.1.recipe.model=5")
    with pytest.raises(ConfigError, match=r"stage shown: the folder of \[\[shown\]\] has this name"):
        plan(TEXT.replace('name = "base"', 'name = "shown"'))


def test_a_file_or_environment_that_is_not_there_is_refused_before_any_stage_runs(plan, tmp_path):
    anchors = 'anchors.file = "shown:solved.jsonl"'
    assert anchors in WITH_REWARD
    with pytest.raises(ConfigError, match=r"stage rl: reward\.anchors\.file: gone\.jsonl: no such file, neither in "):
        plan(WITH_REWARD.replace(anchors, 'anchors.file = "gone.jsonl"'))
    with pytest.raises(ConfigError, match=r"stage w4a8: recipe: a/gone\.toml: no such file"):
        plan(TEXT.replace('scheme = "w4a8"', 'recipe = "a/gone.toml"'))
    with pytest.raises(ConfigError, match=r"stage rl: reward\.model\.folder: gone: no such file"):
        plan(WITH_REWARD.replace('"stage:liking"', '"gone"'))
    (tmp_path / "here.jsonl").touch()
    plan(WITH_REWARD.replace(anchors, 'anchors.file = "here.jsonl"').replace('"stage:liking"', '"owner/on-the-hub"'))
    plan(TEXT.replace('scheme = "w4a8"', 'scheme = "w4a8", calibration = "generated"'))
    for name in ("sort", "guess"):
        with pytest.raises(ConfigError, match="no environment is called 'sortt'; did you mean sort"):
            plan(TEXT.replace(f'"{name}"', '"sortt"'))


@pytest.mark.parametrize("content", [b"{{", b"\xff\xfe"])
def test_a_damaged_recipe_of_a_begun_stage_is_named(plan, content):
    stage = plan().stages[1]
    stage.begin()
    stage.file.write_bytes(content)
    with pytest.raises(TrainingError, match=r"rl\.toml: cannot be understood .*--restart-from rl"):
        plan().check()


def test_shown_conversations_are_solutions_and_named_by_what_they_are(plan, tmp_path):
    first = plan()
    first.show()
    (rows,) = (tmp_path / "run/shown").glob("*.jsonl")
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) == 30
    for row in found:
        asked, said = (message["content"] for message in row["messages"])
        assert said == "".join(sorted(asked.removeprefix("Sort ")))
    more = plan(TEXT.replace("conversations = 30", "conversations = 31"))
    first.stages[0].begin()
    with pytest.raises(TrainingError, match="stage base was begun with another recipe"):
        more.check()
    with pytest.raises(ConfigError, match="shown solved: level: got 9; allowed: 0 to 3"):
        plan(TEXT.replace("conversations = 30", "conversations = 32\nlevel = 9")).show()


def test_pairs_are_two_replies_to_a_task_the_preferred_one_first(plan):
    made = plan(WITH_REWARD)
    made.show()
    (file,) = (made.out / "shown").glob("pairs-*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert 10 < len(found) <= 20
    for row in found:
        chosen, rejected = pair_of(row, TEMPLATE, "row")
        assert chosen.ids != rejected.ids
    with pytest.raises(ConfigError, match="shown solved: sort has no prefers; allowed: solutions"):
        plan(TEXT.replace("conversations = 30", 'conversations = 33\nreplies = "pairs"')).show()


def test_a_reward_model_is_found_by_its_stage_and_nothing_begins_with_it(plan, monkeypatch):
    made = plan(WITH_REWARD)
    reward = made.stage("rl").recipe.reward
    assert reward.model.folder == str(made.out / "liking.checkpoint")
    made.show()
    assert Path(reward.anchors.file).is_file()
    without_measuring(monkeypatch)
    rewarded, plain = needs_of(made)["rl"], needs_of(plan())["rl"]
    assert rewarded.num_bytes - plain.num_bytes == 2 * count_parameters(preset("tiny")).with_mtp  # bfloat16
    # Sampling, three passes' worth of training and one of the engine's replay; the reward model reads once more.
    assert rewarded.seconds / plain.seconds == pytest.approx(6 / 5)
    with pytest.raises(ConfigError, match="stage rl: start: liking is a reward model"):
        plan(WITH_REWARD.replace('start = "base"', 'start = "liking"'))
    with pytest.raises(ConfigError, match="stage rl: reward: base is no reward model; allowed: one of kind reward"):
        plan(WITH_REWARD.replace("stage:liking", "stage:base"))
    cut = WITH_REWARD[: WITH_REWARD.index('[[stage]]\nname = "rl"')]
    with pytest.raises(ConfigError, match="stage liking: a reward model is not served"):
        plan(cut)


def without_measuring(monkeypatch):
    for module in ("train", "rl"):
        monkeypatch.setattr(f"glm5.{module}.estimate.matmul_speed", lambda _: 1e10)
    for module in ("rl.estimate", "post_train.needs"):  # measuring one takes seconds
        monkeypatch.setattr(f"glm5.{module}.process_bytes", lambda _: 2.0**28)


def test_needs_of_every_stage_without_a_checkpoint(plan, monkeypatch):
    without_measuring(monkeypatch)
    made = plan()
    needs = needs_of(made)
    assert needs["base"].num_bytes > 0
    assert needs["rl"].seconds > 0
    assert needs["w4a8"] == (None, None)
    *lines, last, _ = table_of(made).splitlines()
    assert [line.split()[0] for line in lines] == ["stage", "base", "rl", "w4a8"]
    largest = max(one.num_bytes for one in needs.values() if one.num_bytes)
    name, size, unit, *_ = last.split()
    assert (name, size, unit) == ("all", f"{largest / 2**30:.3g}", "GiB")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_stages_that_their_commands_take(path, monkeypatch):
    without_measuring(monkeypatch)
    made = Plan(*read_post_train(path))
    assert [stage.kind for stage in made.stages][-1] == "quantize"
    assert all(one.num_bytes for name, one in needs_of(made).items() if name != made.stages[-1].name)
