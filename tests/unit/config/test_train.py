"""Recipes: every one in recipes/ loads; what is wrong is named by key, with the nearest known one."""

from pathlib import Path

import pytest

from glm5.common.errors import ConfigError
from glm5.config.rl import read_rl_recipe
from glm5.config.train import Recipe, read_recipe

FOLDER = Path(__file__).parents[3] / "recipes"
RECIPES = sorted(path for path in FOLDER.glob("*.toml") if not path.name.startswith(("rl-", "post-train-", "w4a8-")))
SMALL = """
name = "small"
[model]
preset = "tiny"
[[stage]]
name = "one"
kind = "pretrain"
steps = 10
seq_len = 64
sequences = 2
lr = 1e-3
[[stage.data]]
kind = "needle"
"""


def read(tmp_path, text, *settings) -> Recipe:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    return read_recipe(file, settings)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(path):
    recipe = read_rl_recipe(path) if path.stem.startswith("rl-") else read_recipe(path)
    assert recipe.name == path.stem
    if recipe.model.preset is not None:
        assert recipe.model.architecture().num_hidden_layers > 0


def test_there_are_recipes():
    assert len(RECIPES) >= 4


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps = 10", "step = 10", r"stage\.0\.step: no such key; did you mean steps\?"),
        ("lr = 1e-3", "lr = 1e-3\nlr_warmup = 5", r"stage\.0\.lr_warmup: no such key; did you mean lr_warmup_steps\?"),
        ("[model]", "[modle]", r"modle: no such key; did you mean model\?"),
        ('kind = "needle"', 'kind = "needle"\nwieght = 2', r"stage\.0\.data\.0\.wieght: .* did you mean weight\?"),
        ('kind = "needle"', 'kind = "needles"', r"stage\.0\.data\.0\.kind: got 'needles'; allowed: tokens, files"),
        ('kind = "needle"', 'kind = "tokens"', r"stage\.0\.data\.0\.path: .*must be given"),
        ("steps = 10", "", r"stage\.0\.steps: got nothing; allowed: it must be given"),
        ("steps = 10", "steps = 0", r"stage\.0\.steps: got 0; allowed: at least 1"),
        ("steps = 10", 'steps = "ten"', r"stage\.0\.steps: got 'ten'; allowed: an integer"),
        ('kind = "pretrain"', 'kind = "train"', r"stage\.0\.kind: got 'train'"),
        ('preset = "tiny"', "", "either preset or checkpoint; got neither"),
        ('preset = "tiny"', 'preset = "tiny"\ntokenizer = "x"\ndigits_per_token = 2', "for a tokenizer that is learnt"),
        ('preset = "tiny"', 'preset = "huge"', r"model\.preset: got 'huge'"),
        ('preset = "tiny"', 'preset = "tiny"\nconfig = {hiden_size = 8}', "hiden_size is none; .* hidden_size"),
        ("lr = 1e-3", "lr = nan", "cannot be|lr"),
        ("lr = 1e-3", "lr = 1e-3\nlr_warmup_steps = 10", "stage.0: lr_warmup_steps 10 must be below steps 10$"),
        ('name = "small"', "name = 3 4", "cannot be understood: .*line 2"),
        ('name = "small"', 'name = "small"\noptimizer = {kind = "sgd"}', r"optimizer\.kind: got 'sgd'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, old, new, says):
    assert old in SMALL
    with pytest.raises(ConfigError, match=rf"recipe\.toml: .*({says})"):
        read(tmp_path, SMALL.replace(old, new))


def test_two_stages_of_one_name_are_refused(tmp_path):
    stage = SMALL[SMALL.index("[[stage]]") :]
    with pytest.raises(ConfigError, match="two stages are called one"):
        read(tmp_path, SMALL + stage)


def test_keys_are_set_by_their_path(tmp_path):
    settings = ["stage.0.steps=20", "seed=7", "losses.mtp_depth=1", "out=somewhere", "stage.0.data.0.weight=2.5"]
    recipe = read(tmp_path, SMALL, *settings)
    assert (recipe.stage[0].steps, recipe.seed, recipe.losses.mtp_depth) == (20, 7, 1)
    assert (str(recipe.folder), recipe.stage[0].data[0].weight) == ("somewhere", 2.5)
    assert str(read(tmp_path, SMALL).folder) == "runs/small"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("steps", "KEY=VALUE"),
        ("stage.1.steps=3", "a number from 0 to 0 in place of '1'"),
        ("name.first=3", "a key of a table: there is nothing inside"),
        ("stage.0.stpes=3", r"stage\.0\.stpes: no such key; did you mean steps\?"),
        ("seed=9" + "9" * 30, r"seed: got 9+; allowed: below"),
        ("seed=" + "9" * 5000, "cannot be understood: .*digits"),
        ("x=" + "[" * 10**5, "cannot be understood: maximum recursion"),
        ("x" + ".x" * 5000 + "=1", "cannot be understood: maximum recursion"),
        ("stage.0.lr=1e300", r"stage\.0\.lr: got 1e\+300; allowed: at most"),
        ("stage.0.lr=inf", r"stage\.0\.lr: got inf; allowed: "),
        ("stage.0.sequences=10000000000", r"sequences: got 10000000000; allowed: at most 1000000"),
        ("stage.0.data=[]", r"stage\.0\.data: got \[\]; allowed: at least 1 of them"),
        ("stage.0.name='data'", r"stage\.0\.name: got 'data'; allowed: a name that no file or folder of the run has"),
        ("stage.0.name='state.pt'", r"stage\.0\.name: got 'state\.pt'; allowed: a name that no file"),
        ("workers=100000", "workers: got 100000; allowed: at most 1024"),
        ("checkpoints.max_shard_mb=1e308", r"max_shard_mb: got 1e\+308; allowed: at most"),
        ('out="a\\u0000b"', "out: got "),
        ("out=''", "out: got ''"),
    ],
    ids=lambda text: text[:20],
)
def test_wrong_settings_are_named(tmp_path, setting, says):
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, SMALL, setting)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        read_recipe(tmp_path / "none.toml")
