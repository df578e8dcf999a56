"""Recipes of post-training: what is wrong with one is one error that names it; references and files are found."""

from pathlib import Path

import pytest

from glm5.common.errors import ConfigError
from glm5.config.post_train import read_post_train, resolved

FOLDER = Path(__file__).parents[3] / "recipes"
RECIPES = sorted(FOLDER.glob("post-train-*.toml"))
TEXT = """
name = "small"
[evaluation]
tasks = 4
[[skill]]
environment = "sort"
[[shown]]
name = "solved"
environment = "sort"
conversations = 3
[[stage]]
name = "base"
kind = "train"
recipe = { model = { tokenizer_files = ["shown:solved.txt"] } }
[[stage]]
name = "rl"
kind = "rl"
recipe = "own.toml"
[[stage]]
name = "w4a8"
kind = "quantize"
start = "base"
recipe = { scheme = "w4a8" }
"""


def read(tmp_path, text, *settings):
    (tmp_path / "own.toml").write_text('steps = 3\nteacher = [{ checkpoint = "stage:base" }]\nfiles = ["*.jsonl"]')
    (tmp_path / "some.jsonl").write_text("{}\n")
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    return read_post_train(file, settings)


def test_stages_are_tables_with_files_beside_the_recipe(tmp_path):
    recipe, (base, rl, w4a8) = read(tmp_path, TEXT)
    assert [recipe.start_of(stage) for stage in recipe.stage] == [None, "base", "base"]
    assert rl["files"] == [str(tmp_path / "*.jsonl")]
    assert w4a8 == {"scheme": "w4a8"}
    found = resolved([base, rl], lambda kind, name: f"<{kind} {name}>")
    assert found[0]["model"] == {"tokenizer_files": ["<shown solved.txt>"]}
    assert found[1]["teacher"] == [{"checkpoint": "<stage base>"}]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('start = "base"', 'start = "sft"', "stage w4a8: start: sft is no stage; known before it are base, rl"),
        (
            'start = "base"',
            'start = "w4a8"',
            "start: w4a8 comes later, or is the stage itself; known before it are base",
        ),
        (
            'name = "base"\nkind = "train"',
            'name = "base"\nkind = "train"\nstart = "rl"',
            "rl comes later, .*; it is the",
        ),
        (
            'name = "base"\nkind = "train"',
            'name = "base"\nkind = "quantize"',
            "stage base: quantize needs a stage before",
        ),
        ('name = "rl"', 'name = "base"', "two stages are called base"),
        ('recipe = "own.toml"', 'recipe = "other.toml"', "stage rl: recipe: other.toml: no such file"),
        ('recipe = "own.toml"', 'recipe = { data = { files = "no" } }', "stage rl: data.files: no: no such file"),
        ("shown:solved.txt", "shown:other.txt", r"shown:other.txt is no file of a \[\[shown\]\]; known: solved.jsonl"),
        ("shown:solved.txt", "stage:rl", "stage base: stage:rl comes later"),
        ('kind = "rl"', 'kind = "chat"', r"stage\.1\.kind: got 'chat'"),
        ("tasks = 4", "tasks = 0", r"evaluation\.tasks: got 0; allowed: at least 1"),
        ("tasks = 4", "tasks = 4\nmargin = nan", r"evaluation\.margin"),
        ("tasks = 4", "tasks = 4\nrollouts = { max_tokens = 2048 }", "max_tokens must be below max_model_len"),
        ('environment = "sort"', 'environmnt = "sort"', "did you mean environment"),
    ],
)
def test_what_is_wrong_is_one_error(tmp_path, old, new, says):
    with pytest.raises(ConfigError, match=says) as error:
        read(tmp_path, TEXT.replace(old, new, 1))
    assert "\n" not in str(error.value)


def test_a_recipe_file_that_is_no_toml(tmp_path):
    (tmp_path / "broken.toml").write_text("steps = ")
    with pytest.raises(ConfigError, match=r"stage rl: .*broken\.toml: cannot be understood"):
        read(tmp_path, TEXT.replace("own.toml", "broken.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(path):
    recipe, tables = read_post_train(path)
    assert recipe.name == path.stem
    assert len(tables) == len(recipe.stage)
