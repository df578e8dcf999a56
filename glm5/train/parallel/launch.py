"""Starts the processes of a run on this machine, as torchrun would, and ends them all when one has ended badly.

Which rank it was is said, and how: its exit, its own words, or that the others waited for it in vain.
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
"""In the environment of ranks: the process that started them, and that they end with."""
_LOOKS_EVERY_S = 0.05
_GRACE_S = 8.0  # for the others to say whom they waited for
_STOP_S = 600.0  # for a step and a state, after Ctrl-C


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
            start_new_session=True,  # Ctrl-C is for this process, which then asks each of them once
        )
        for rank in range(num)
    ]
    try:
        with noted_interrupt() as interrupted:  # the first rank says so
            _watch(ranks, store, interrupted)
        if interrupted:
            raise KeyboardInterrupt
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _watch(ranks: Sequence[subprocess.Popen[bytes]], store: Store, interrupted: list[int]) -> None:
    told, deadline = False, float("inf")
    while any(process.poll() is None for process in ranks):
        if interrupted and not told:
            told, deadline = True, time.monotonic() + _STOP_S
            for process in ranks:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
        if time.monotonic() > deadline:
            return
        if not told and any(process.poll() for process in ranks):
            _fail(ranks, store)
        time.sleep(_LOOKS_EVERY_S)
    if not told and any(process.poll() for process in ranks):
        _fail(ranks, store)


def _fail(ranks: Sequence[subprocess.Popen[bytes]], store: Store) -> None:
    """Who did not wait for anybody, and ended; else who has not ended though others waited for it."""
    until = time.monotonic() + _GRACE_S
    while time.monotonic() < until:
        for rank, process in enumerate(ranks):
            code = process.poll()
            if code and not store.check([f"waits/{rank}"]):
                said = store.get(f"fate/{rank}").decode() if store.check([f"fate/{rank}"]) else ""
                raise TrainingError(f"rank {rank} of {len(ranks)} {_how(code)}{': ' if said else ''}{said}")
        if all(process.poll() is not None for process in ranks):
            break
        time.sleep(_LOOKS_EVERY_S)
    silent = [str(rank) for rank, process in enumerate(ranks) if process.poll() is None]
    who = f"rank {', '.join(silent)} of {len(ranks)} hung" if silent else f"all {len(ranks)} ranks lost each other"
    raise TrainingError(f"{who}: the others waited in vain; the same command goes on from the last checkpoint")


def _how(code: int) -> str:
    return f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
