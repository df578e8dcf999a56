"""`glm5 serve` in a process of its own on this machine, for programs that ask their own model over HTTP."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from glm5.common.errors import GlmError
from glm5.common.interrupt import end_with_parent

_SECONDS = 60


@contextmanager
def server(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """Serve `model` on a free port; gives the URL, and ends the server with the block, or with this process. Its log
    goes to the file `log`. Raises GlmError."""
    command = [sys.executable, "-m", "glm5", "serve", str(model), "--port", "0", *flags]
    bound = partial(end_with_parent, os.getpid())
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=bound)
    with process:
        try:
            yield _listening_on(process, log)
        finally:
            process.terminate()
            process.wait(_SECONDS)


def _listening_on(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("listening on "):
            return line.removeprefix("listening on ").strip()
    raise GlmError(f"the server ended before it listened; {log} says why")
