"""Without the extras: what needs one names it with its pip command, and all the rest works.

The packages are hidden from a child process by an import hook, as if they had never been installed.
"""

import subprocess
import sys

import pytest

HIDE = """
import sys
class Hidden:
    names = {names!r}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError("hidden by the test: " + name, name=name)
sys.meta_path.insert(0, Hidden())
"""
ALL = [
    "fastapi",
    "starlette",
    "uvicorn",
    "websockets",
    "openai",
    "xgrammar",
    "transformers",
    "accelerate",
    "triton",
    "pytest",
]


def without(names: list[str], code: str, *args: str) -> subprocess.CompletedProcess[str]:
    code = HIDE.format(names=names) + code
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)


def glm5_without(names: list[str], *args: str) -> subprocess.CompletedProcess[str]:
    return without(names, "from glm5.cli.main import main; sys.exit(main(sys.argv[1:]))", *args)


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("extras") / "tiny"
    done = glm5_without(ALL, "init", "--preset", "tiny", "--out", str(out))
    assert done.returncode == 0, done.stderr
    return str(out)


def test_the_core_works_without_any_extra(tiny_checkpoint):
    code = """
import glm5
from glm5.cli.main import main
assert main(["--help"]) == 0
assert main(["inspect", sys.argv[1]]) == 0
assert glm5.load(sys.argv[1]).logits([1, 2, 3]).shape == (3, 320)
glm5.LLM, glm5.AsyncEngine
"""
    done = without(ALL, code, tiny_checkpoint)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("hidden", ["fastapi", "uvicorn"])
def test_serve_names_its_extra(hidden, tiny_checkpoint):
    done = glm5_without([hidden], "serve", tiny_checkpoint)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1]
        == f"glm5: error: this needs the package {hidden!r}: run  pip install 'glm5[serve]'"
    )
    assert "Traceback" not in done.stderr


def test_serve_names_its_extra_before_it_downloads():
    done = glm5_without(["fastapi", "huggingface_hub"], "serve", "zai-org/GLM-5-FP8")
    assert done.returncode == 1
    assert done.stderr.endswith("run  pip install 'glm5[serve]'\n")


def test_bench_names_its_extra_before_it_downloads():
    done = glm5_without(
        ["transformers", "huggingface_hub"], *["bench", "latency", "--model", "a/b", "--against", "transformers"]
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("package 'transformers': run  pip install 'glm5[bench]'")


def test_demo_names_its_extra_before_it_trains(tmp_path):
    done = glm5_without(["openai"], "demo", "--out", str(tmp_path / "demo"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "glm5: error: this needs the package 'openai': run  pip install 'glm5[demo]'"
    assert not (tmp_path / "demo").exists()
