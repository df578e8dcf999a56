"""Starts the processes of a run on this machine, as torchrun does, and ends all when one fails.

The error names the rank that failed and the reason: its exit code, its message, or that the others timed out on it.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from torch._C._distributed_c10d import Store

from glm5.common.errors import TrainingError
from glm5.common.interrupt import noted_interrupt, signal_name
from glm5.parallel.rendezvous import Rendezvous

LAUNCHER = "GLM5_LAUNCHER"
"""Environment variable of the ranks: the process that started them. They end when it ends."""
_LOOKS_EVERY_S = 0.05
_GRACE_S = 8.0  # for the other ranks to report which rank they waited for
_STOP_S = 600.0  # after Ctrl-C, to finish a step and write the state


def launch(command: Sequence[str], num: int, environment: Mapping[str, str]) -> None:
    """Run `command` as `num` ranks to their end. Raises TrainingError that names the rank that failed, and
    KeyboardInterrupt when they were stopped."""
    rendezvous = Rendezvous()
    store = rendezvous.open(num)
    ranks = [
        subprocess.Popen(
            list(command),
            env={
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(rendezvous.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                LAUNCHER: str(os.getpid()),
            },
            start_new_session=True,  # Ctrl-C reaches only this process, which then signals each of them once
        )
        for rank in range(num)
    ]
    try:
        with noted_interrupt() as interrupted:  # the first rank prints the message
            _watch(ranks, store, interrupted)
        if interrupted:
            raise KeyboardInterrupt
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _watch(ranks: Sequence[subprocess.Popen[bytes]], store: Store, interrupted: list[int]) -> None:
    has_signalled, deadline = False, float("inf")
    is_running = True
    while is_running:
        is_running = any(process.poll() is None for process in ranks)
        if interrupted and not has_signalled:
            has_signalled, deadline = True, time.monotonic() + _STOP_S
            for process in ranks:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
        if time.monotonic() > deadline:
            return
        if not has_signalled and any(process.poll() for process in ranks):
            _fail(ranks, store)
        time.sleep(_LOOKS_EVERY_S)


def _fail(ranks: Sequence[subprocess.Popen[bytes]], store: Store) -> None:
    """TrainingError that names a rank that failed without waiting for another, or else the ranks that hang."""
    until = time.monotonic() + _GRACE_S
    while time.monotonic() < until:
        for rank, process in enumerate(ranks):
            code = process.poll()
            if code and not store.check([f"waits/{rank}"]):
                message = store.get(f"fate/{rank}").decode() if store.check([f"fate/{rank}"]) else ""
                raise TrainingError(f"rank {rank} of {len(ranks)} {_reason(code)}{': ' if message else ''}{message}")
        if all(process.poll() is not None for process in ranks):
            break
        time.sleep(_LOOKS_EVERY_S)
    silent = [str(rank) for rank, process in enumerate(ranks) if process.poll() is None]
    who = f"rank {', '.join(silent)} of {len(ranks)} hung" if silent else f"all {len(ranks)} ranks lost each other"
    raise TrainingError(f"{who}: the others waited in vain; the same command goes on from the last checkpoint")


def _reason(code: int) -> str:
    return f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
