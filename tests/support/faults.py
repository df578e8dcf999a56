"""Faults of every process of an asynchronous run: `python -m tests.support.faults --faults 40 --seed 0`.

Processes are killed, or stopped: engines and the trainer until their heartbeats are missed, others for some seconds.
The run is also asked to end (SIGTERM), whatever is under way; it must then end by itself and leave no process. After
its end, of whichever kind, the same command goes on. At last every group of every step is there once, and nothing stale
was trained.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from glm5.rl.records.store import Records, read_groups
from glm5.rl.watch import read_lines
from tests.support.rl_recipe import TEXT

GROUPS, STALENESS = 4, 2
SETTINGS = (
    *("asynchronous.max_staleness=2", 'algorithm.name="dis"', 'rollouts.devices=["cpu", "cpu"]'),
    *("rollouts.watchdog_timeout=4", "environment.0.tasks=1000", "evaluation.every=1000", "workers=2"),
    *("records.state_every=3", "trainer.timeout_s=4"),
)
ENDED = (130, 143, -signal.SIGTERM)
"""Exit codes of a run that was asked to end."""
PAUSE = (0.5, 2.5)
"""Seconds between faults, of which the first comes when a step has been trained."""


def children(pid: int) -> Iterator[tuple[int, str]]:
    """(process, what it is): "engine", "trainer" or "worker"."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            is_child = folder.name.isdigit() and int(_stat(folder)[1]) == pid
            if is_child and (kind := kind_of(folder)) is not None:
                yield int(folder.name), kind


def kind_of(folder: Path) -> str | None:
    """What a process of /proc is, if it runs."""
    try:
        command = folder.joinpath("cmdline").read_text()
    except OSError:
        return None
    kinds = {"glm5.engine": "engine", "glm5.common.remote": "trainer", "environments.worker": "worker"}
    return next((kind for module, kind in kinds.items() if module in command), None)


def _stat(folder: Path) -> list[str]:
    return folder.joinpath("stat").read_text().rpartition(")")[2].split()


class Faults:
    """A run, and what is done to it."""

    def __init__(self, folder: Path, seed: int, settings: Sequence[str]) -> None:
        self.out, self.random = folder / "run", Random(seed)
        (folder / "small.toml").write_text(TEXT)
        self._command = [sys.executable, "-m", "glm5", "rl", str(folder / "small.toml"), "--set", *SETTINGS, *settings]
        self._command.append(f'out="{self.out}"')
        self._log = folder / "log.txt"
        self.told, self.ended = list[str](), list[float]()
        self._asked_at, self._children = 0.0, list[tuple[int, str]]()

    def run(self, count: int) -> list[float]:
        """Seconds from each fault to the next trained step."""
        process, recovered, at = self._start(), list[float](), None
        left, next_at = count, time.monotonic() + 1e9
        stopped: list[tuple[float, int]] = []
        seen = self._steps()
        while True:
            now, done = time.monotonic(), self._steps()
            for until, pid in [one for one in stopped if one[0] < now]:
                stopped.remove((until, pid))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            if done != seen:
                seen = done
                if at is not None:
                    recovered.append(now - at)
                    at = None
                next_at = min(next_at, now + self.random.uniform(*PAUSE))
            if (code := process.poll()) is not None:
                if code == 0:
                    return recovered
                if code in ENDED:
                    self.ended.append(now - self._asked_at)
                    outliving = [one for one in self._children if one[1] == kind_of(Path(f"/proc/{one[0]}"))]
                    assert not outliving, f"processes {outliving} outlive the run"
                elif code != -signal.SIGKILL:
                    raise AssertionError(f"exit code {code}: {self._log.read_text()[-3000:]}")
                process = self._start()
            elif left and now > next_at and at is None:
                self._fault(process, stopped)
                left, at, next_at = left - 1, now, 1e18
            time.sleep(0.05)

    def _fault(self, process: "subprocess.Popen[bytes]", stopped: list[tuple[float, int]]) -> None:
        found = [*children(process.pid), (process.pid, "run")]
        kind = self.random.choice(sorted({kind for _, kind in found}))
        pid = self.random.choice([one for one, what in found if what == kind])
        if kind == "run" and self.random.random() < 0.5:
            self.told.append("end run")
            self._asked_at, self._children = time.monotonic(), found[:-1]
            process.terminate()
            return
        stops = self.random.random() < 0.5
        self.told.append(f"{'stop' if stops else 'kill'} {kind}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        if stops and kind not in ("engine", "trainer"):
            stopped.append((time.monotonic() + 3, pid))

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    def _steps(self) -> int:
        try:
            return sum("reward/mean" in line for line in read_lines(self.out / "metrics.jsonl"))
        except OSError:
            return 0


def check(out: Path, steps: int) -> None:
    """Every step has its groups, each group was trained once, and no token is too old."""
    numbers: list[int] = []
    for step in range(1, steps + 1):
        groups = read_groups(Records(out), step)
        numbers += [group.number for group in groups]
        for rollout in (one for group in groups for one in group.rollouts if one.is_valid):
            oldest = rollout.tree.oldest_version
            assert oldest is None or 0 <= step - 1 - oldest <= STALENESS, (step, oldest)
    assert len(numbers) == len(set(numbers)) == steps * GROUPS, (len(numbers), len(set(numbers)))


def quantiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"median {ordered[len(ordered) // 2]:.1f} s, most {ordered[-1]:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--set", nargs="*", default=[], help="more settings of the recipe")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        faults = Faults(Path(folder), args.seed, [f"steps={args.steps}", *args.set])
        recovered = faults.run(args.faults)
        check(faults.out, args.steps)
    counts = {what: faults.told.count(what) for what in sorted(set(faults.told))}
    print(f"{len(faults.told)} faults: {counts}; to the next trained step {quantiles(recovered)}")
    if faults.ended:
        print(f"ends that were asked for took {quantiles(faults.ended)}")


if __name__ == "__main__":
    main()
