"""Processes that train together end together, and the one whose fault it was is named."""

import os
import sys
import time

import pytest

from glm5.common.errors import TrainingError
from glm5.train.parallel.launch import launch


def command(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{code}"]


def test_ranks_know_who_they_are_and_end_in_order(tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR TORCHELASTIC_USE_AGENT_STORE MINE"
    code = f"open('{tmp_path}/%d' % rank, 'w').write(' '.join(os.environ[name] for name in '{names}'.split()))"
    launch(command(code), 2, {**os.environ, "MINE": "kept"})
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [
        f"{rank} {rank} 2 127.0.0.1 True kept" for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else time.sleep(60)", "rank 2 of 3 was ended by SIGKILL"),
        ("sys.exit(7) if rank == 1 else time.sleep(60)", "rank 1 of 3 failed with exit code 7"),
    ],
    ids=["killed", "failed"],
)
def test_the_rank_that_ended_badly_is_named_and_the_others_end(code, said):
    began = time.monotonic()
    with pytest.raises(TrainingError, match=said):
        launch(command(code), 3, os.environ)
    assert time.monotonic() - began < 50, "the others were not waited for"


@pytest.mark.slow
def test_a_rank_that_all_wait_for_is_named():
    """The others say that they waited, and end; one neither speaks nor ends."""
    waits = """
if rank == 1:
    time.sleep(60)
from torch.distributed import TCPStore
store = TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), 2, False, wait_for_workers=False)
store.set(f'waits/{rank}', '')
sys.exit(1)
"""
    with pytest.raises(TrainingError, match=r"rank 1 of 2 hung: the others waited in vain; the same command goes on"):
        launch(command(waits), 2, os.environ)
