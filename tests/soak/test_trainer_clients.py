"""Unmodified clients of outside trainers against `glm5 serve` of the small model: verifiers, TRL, OpenEnv.

Their packages exclude one another, so each may be in an environment of its own: GLM5_TEST_PYTHONS names interpreters,
separated by colons. verifiers' environment kuhn-poker is in verifiers' repository, not in its package.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_docs_run import start_server

pytestmark = pytest.mark.long
REPO = Path(__file__).parents[2]
SCRIPTS, MINI = REPO / "tests/support/trainers", REPO / "models/mini"
INTERPRETERS = [sys.executable, *filter(None, os.environ.get("GLM5_TEST_PYTHONS", "").split(":"))]
SECONDS = 600


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    flags = "--served-model-name policy --logprobs-mode processed_logprobs --enable-return-routed-experts"
    process, address = start_server(f"glm5 serve {MINI} --port 8000 {flags}", tmp_path_factory.mktemp("server"))
    with process:
        yield f"http://{address}"
        process.terminate()


def interpreter(*packages: str) -> str:
    """One that has them all."""
    code = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, {packages})))"
    for python in INTERPRETERS:
        if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"needs {' and '.join(packages)} in one of the interpreters of GLM5_TEST_PYTHONS")


@pytest.mark.parametrize(
    ("script", "packages"),
    [
        ("verifiers_episode.py", ("verifiers", "renderers", "kuhn_poker")),
        ("trl_client.py", ("trl", "aiohttp")),
        ("openenv_probe.py", ("openenv",)),
    ],
)
def test_a_client_as_it_is(request, tmp_path, script, packages):
    command = [interpreter(*packages), str(SCRIPTS / script), request.getfixturevalue("url")]
    command += [str(MINI)] if script.startswith("verifiers") else []
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stderr[-4000:]
