"""Whole runs of a small recipe: started, ended and looked at from outside."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from glm5.engine import AsyncEngine
from glm5.rl.records.digest import digests
from glm5.rl.watch import read_lines
from tests.support.rl_recipe import recipe_file

REPO = Path(__file__).parents[2]
SECONDS = 120


def steps_of(out: Path) -> list[dict[str, Any]]:
    """The lines of training steps."""
    return [line for line in read_lines(out / "metrics.jsonl") if "reward/mean" in line]


def weights_of(out: Path) -> dict[str, str]:
    return dict(digests(torch.load(out / "state.pt", weights_only=True)["trainer"]["model"]))


def command(folder: Path, *settings: str, flags: Sequence[str] = ()) -> list[str]:
    given = [f"out={folder / 'run'}", *settings]
    return [sys.executable, "-m", "glm5", "rl", str(recipe_file(folder)), "--set", *given, *flags]


def finish(folder: Path, *settings: str, flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *settings, flags=flags), capture_output=True, text=True, timeout=SECONDS)


def run_until(folder: Path, said: str, number: int, *settings: str) -> tuple[int, str]:
    """Start the command, send it a signal once it says that; returns its exit code, and what it wrote."""
    with subprocess.Popen(command(folder, *settings), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = list[str]()
        for line in process.stderr:
            lines.append(line)
            if number and said in line:
                process.send_signal(number)
                number = 0
        return process.wait(SECONDS), "".join(lines)


def killing_engine(monkeypatch: Any, at_calls: Sequence[int], of: str = "generate") -> None:
    """Kill the engine's process at those of its calls."""
    calls = [0]
    call = getattr(AsyncEngine, of)

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] in at_calls:
            os.kill(self.llm.client.link.pid, signal.SIGKILL)
        return call(self, *args, **options)

    monkeypatch.setattr(AsyncEngine, of, counted)
