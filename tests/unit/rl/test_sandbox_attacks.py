"""Attacks on boxes (the table: tests/support/sandbox_attacks.py), as this user and as nobody, on each kind of box."""

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.choice import SYSTEM_PYTHON, candidates, reason_against
from tests.support.sandbox_attacks import ATTACKS, try_all

REPO = Path(__file__).parents[3]
NAMES = [attack.name for attack in ATTACKS]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    reasons = {backend: reason_against(backend) for backend in candidates()}
    working = [backend for backend, reason in reasons.items() if not reason]
    if not working:
        pytest.skip(f"no boxes here: {list(reasons.values())}")
    return try_all(working[0])


def test_at_least_twenty():
    assert len(set(NAMES)) == len(ATTACKS) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_an_attack_is_contained(outcomes, name):
    assert not outcomes[name]


def test_attacks_work_without_a_box(outcomes):
    """The control: what they print where nothing holds them."""
    harmless = ["network", "abstract socket of the host", "files of the host", "/proc", "links", "new namespaces"]
    unsafe = Backend("unsafe-local", sys.executable, is_same_python=True)
    found = try_all(unsafe, harmless)
    assert [name for name in harmless if "BREACH" in found[name]] == harmless


@pytest.mark.slow
@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("kind", ["bubblewrap", "namespaces"])
def test_every_attack_on_every_kind_as_root_and_as_nobody(kind, user):
    if os.geteuid() != 0:
        pytest.skip("needs root, to be root and nobody")
    backend = next((backend for backend in candidates() if backend.kind == kind), None)
    if reason := reason_against(backend) if backend else "not installed":
        pytest.skip(f"{kind}: {reason}")
    python, settings = sys.executable, {}
    if user == "nobody":
        python, account = SYSTEM_PYTHON, pwd.getpwnam("nobody")
        settings = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"}
    run = lambda *argv: subprocess.run(argv, env=environment, cwd="/", capture_output=True, text=True, **settings)  # noqa: E731
    if (
        not shutil.which(python)
        or run(python, "-c", "import tests.support, sys; assert sys.version_info >= (3, 11)").returncode
    ):
        pytest.skip(f"{user} has no Python 3.11 that can read {REPO}")
    done = run(python, "-m", "tests.support.sandbox_attacks", kind)
    assert done.returncode == 0, done.stderr
    assert {name: wrong for name, wrong in json.loads(done.stdout).items() if wrong} == {}
