"""What CI's preparation does on machines of each kind: never more than one line, never a failure."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "chromium"
BASH = "/bin/bash"


@pytest.fixture
def prepare(tmp_path):
    """Runs the script where only these programs exist; gives its output and the calls of apt-get."""
    calls = tmp_path / "calls"
    calls.touch()

    def run(user: int = 0, **programs: str) -> tuple[str, list[str]]:
        for name, body in {"id": f"echo {user}", "timeout": 'shift; exec "$@"', **programs}.items():
            path = tmp_path / name.replace("_", "-")
            path.write_text(f"#!{BASH}\n{body}\n")
            path.chmod(0o755)
        (tmp_path / "sh").symlink_to("/bin/sh")
        done = subprocess.run([BASH, SCRIPT], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout, calls.read_text().splitlines()

    return run


APT = 'echo "$*" >>"${0%/*}/calls"; echo much; echo "E: why" >&2; '


def test_it_installs_what_is_missing(prepare):
    said, calls = prepare(apt_get=APT)
    assert said == ""
    assert calls == ["-q update", "-q install --yes --no-install-recommends chromium"]


@pytest.mark.parametrize("programs", [{"chromium": "", "apt_get": APT}, {}, {"user": 1000, "apt_get": APT}])
def test_it_does_nothing_where_there_is_nothing_to_do(prepare, programs):
    assert prepare(**programs) == ("", [])


def test_a_failure_is_one_line(prepare):
    said, _ = prepare(apt_get=APT + "exit 100")
    assert said == "chromium could not be installed, the tests that need it are skipped: E: why\n"
