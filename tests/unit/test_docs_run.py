"""What the guides show is run: `glm5` lines and Python blocks, in order, in an empty folder.

Servers are started on a free port and the lines after them are sent there. What needs the network, a GPU, a terminal,
Docker or minutes is only parsed (test_docs.py).
"""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_docs import DOCUMENTS

BLOCKS = re.compile(r"^```(sh|python)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(
    r"^(make|docker|pip|git|cd|ray) |^\.ci/|zai-org/|PATH_OR_ID|^glm5 (chat|demo|rl|post-train|bench (all|kernels|rl))"
    r"|^python3? -m|runs/demo"
)
ADDRESS = "127.0.0.1:8000"
TIMEOUT = 120  # seconds for one block; the longest takes about 5
# Up to a quarter of a minute each: they run in `make soak`.
LONG = {"apis.md", "bench.md", "chat.md", "engine.md", "operations.md", "rl-gateway.md", "routers.md"}
INIT = "glm5 init --preset nano --out runs/random --seed 0"


def blocks(document: Path) -> list[tuple[str, str]]:
    return BLOCKS.findall(document.read_text(encoding="utf-8"))


def run(command: list[str], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def initialized(tmp_path_factory) -> Path:
    """The folder in which INIT was run, as many documents begin with it."""
    folder = tmp_path_factory.mktemp("initialized")
    run(shell(INIT), folder)
    return folder


@pytest.fixture
def servers():
    """Server processes of one document; stopped at the end, each by its own handle."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.send_signal(signal.SIGTERM)
        with process:
            assert process.wait(TIMEOUT) == 0


def start_server(line: str, cwd: Path) -> tuple[subprocess.Popen[str], str]:
    """The process, and the address that it printed."""
    command = shell(re.sub(r"--port \d+", "--port 0", line))
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = []
    for printed in process.stdout:
        output.append(printed)
        if found := re.search(r"listening on http://(\S+)", printed):
            return process, found.group(1)
    raise AssertionError(f"{line}\n{''.join(output)}")


def shell(line: str) -> list[str]:
    return ["bash", "-euc", re.sub(r"^glm5\b", f"{sys.executable} -m glm5", line)]


@pytest.mark.parametrize(
    "document",
    [pytest.param(path, marks=pytest.mark.slow if path.name in LONG else ()) for path in DOCUMENTS],
    ids=lambda path: path.name,
)
def test_every_block_runs(document, tmp_path, servers, initialized):
    address = ADDRESS
    for language, text in blocks(document):
        for line in text.replace("\\\n", " ").replace(ADDRESS, address).splitlines() if language == "sh" else ():
            if not line.strip() or NOT_RUN.search(line) or (line.startswith("curl ") and shutil.which("curl") is None):
                continue
            if line == INIT:
                shutil.copytree(initialized, tmp_path, dirs_exist_ok=True)
            elif line.startswith("glm5 serve"):
                process, address = start_server(line, tmp_path)
                servers.append(process)
            else:
                run(shell(line), tmp_path)
    # Python blocks of a guide continue one another.
    python = [text for language, text in blocks(document) if language == "python" and "PATH_OR_ID" not in text]
    if script := "\n".join(python):
        run([sys.executable, "-c", script.replace(ADDRESS, address)], tmp_path)


def test_the_guides_have_something_to_run():
    assert sum(len(blocks(document)) for document in DOCUMENTS) >= 10
