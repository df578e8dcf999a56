"""Long commands import at their start all that they will need: what is missing is found out then, not hours later."""

import json
import subprocess
import sys

import pytest

from glm5.checkpoint.init import write_random
from glm5.config.presets import preset
from tests.support.training import recipe_file, stage

# Imports torch once, with what its optimizers fetch late by themselves, then runs each command in a fork.
RUN = """
import json, os, sys, traceback
from importlib import import_module
import torch._dynamo

NEVER_MISSING = {"torch", *sys.stdlib_module_names}

def imported_late(argv, begins):
    module, _, name = begins.partition(":")
    begin, before = getattr(import_module(module), name), set()

    def noted(*args, **kwargs):
        before.update(before or sys.modules)
        return begin(*args, **kwargs)

    setattr(sys.modules[module], name, noted)
    code = import_module("glm5.cli.main").main(argv)
    if code or not before:
        return [f"code {code}, {len(before)} modules before"]
    late = sys.modules.keys() - before
    packages = {name.partition(".")[0] for name in late} - {name.partition(".")[0] for name in before}
    return sorted({name for name in late if name.startswith("glm5.")} | (packages - NEVER_MISSING))

for number, (argv, begins) in enumerate(json.load(sys.stdin)):
    if not (child := os.fork()):
        try:
            found = imported_late(argv, begins)
        except BaseException:
            found = [traceback.format_exc()]
        with open(sys.argv[1], "a") as file:
            file.write(json.dumps([number, found]) + "\\n")
        os._exit(0)
    os.waitpid(child, 0)
"""
BRIEF = "--held-out-tokens 0 --sample-len 16 --num-samples 2 --min-tokens 2 --device cpu"
SHORT = "--lengths 512 --num-samples 1 --tasks niah_single_1 --device cpu"
# Commands, and the function that each hands over to.
COMMANDS = {
    "tokenize {0}/text.jsonl --tokenizer {0}/nano --out {0}/tokens": "glm5.train.data.tokenize:tokenize",
    "convert {0}/nano {0}/fp8 --dtype fp8": "glm5.quantize.convert:convert",
    f"quantize {{0}}/nano {{0}}/int4 --scheme w4a16 {BRIEF}": "glm5.quantize.run:quantize",
    "train {0}/recipe.toml --set out={0}/run": "glm5.train.loop:train",
    f"eval ruler {{0}}/nano --attention window --json {{0}}/ruler.json {SHORT}": "glm5.eval.ruler:evaluate",
    # The control: its file's last import comes after its flags are read.
    "key alice --file {0}/keys.toml": "glm5.cli.key:read",
}  # fmt: skip


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """By the first word of each command: modules of glm5, and other packages, that were imported once it had begun."""
    folder = tmp_path_factory.mktemp("imports")
    write_random(preset("nano"), folder / "nano", seed=0)
    (folder / "text.jsonl").write_text('{"text": "Once upon a time there was a cat."}\n' * 20)
    recipe = recipe_file(folder, stage(kind="sft", steps=1, qat='"int4"'))
    recipe.write_text(recipe.read_text().replace('preset = "tiny"', 'preset = "nano"').replace('dtype = "float32"', ""))
    orders = [(line.format(folder).split(), begins) for line, begins in COMMANDS.items()]
    found = folder / "found"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(found)], input=json.dumps(orders), capture_output=True, text=True, check=True
    )
    results = dict(json.loads(line) for line in found.read_text().splitlines())
    return {argv[0]: (results[number], done.stderr) for number, (argv, _) in enumerate(orders)}


@pytest.mark.parametrize("command", ["tokenize", "convert", "quantize", "train", "eval"])
def test_nothing_is_imported_once_the_work_has_begun(late, command):
    modules, said = late[command]
    assert modules == [], said


def test_the_test_notices_what_is(late):
    modules, _ = late["key"]
    assert "glm5.serve.http.keys" in modules
