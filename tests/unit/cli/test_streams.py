"""Commands whose standard streams are closed, or cannot show every character."""

import os
import subprocess
import sys

import pytest

GLM5 = f"{sys.executable} -m glm5"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.parametrize(
    ("closed", "code", "message"),
    [
        ("generate {model} --max-tokens 2 <&-", 1, "the prompt is empty"),
        ("chat {model} --max-tokens 2 <&-", 0, ""),
        ("generate {model} --prompt a --max-tokens 2 <&- >&- 2>&-", 0, ""),
    ],
)
def test_closed_streams(checkpoint, closed, code, message):
    done = shell(f"{GLM5} {closed.format(model=checkpoint)}")
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_characters_that_the_terminal_lacks(tmp_path):
    folder = tmp_path / "caf\u00e9"
    done = shell(f"{GLM5} init --preset tiny --out '{folder}'", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "caf\\xe9; look at it with" in done.stdout
    assert (folder / "config.json").is_file()
