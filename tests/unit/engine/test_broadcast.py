"""Weights that are pushed by a collective (gloo here, NCCL on GPUs): members that end, what an engine then holds."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import glm5
from glm5.common.errors import CheckpointError, EngineDead, GlmError, RequestError
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.parallel.broadcast import BroadcastGroup
from glm5.parallel.rendezvous import Rendezvous, store_at
from tests.support.engines import save_tiny

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 9, 2, 17]


def members(size: int, timeout_s: float = 60.0):
    """Groups of one process, made at the same time as they must be."""
    rendezvous = Rendezvous()

    def make(rank: int) -> BroadcastGroup:
        store = store_at(rendezvous.port, size) if rank else rendezvous.open(size)
        return BroadcastGroup(store, rank, size, CPU, timeout_s=timeout_s)

    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(make, range(size))]


def test_all_members_get_the_bytes_of_the_first():
    groups = members(3)
    data = [torch.randint(0, 256, (10_007,), dtype=torch.uint8) for _ in groups]
    want = data[0].clone()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda group, one: group.broadcast(one), groups, data))
    assert all(torch.equal(one, want) for one in data)


def test_a_member_that_does_not_take_part_is_waited_for_within_the_limit():
    first, second = members(2, timeout_s=0.2)
    with pytest.raises(GlmError, match=r"did not take part|did not arrive"):
        second.broadcast(torch.zeros(1 << 20, dtype=torch.uint8))
    with pytest.raises(GlmError, match="has ended"):
        second.broadcast(torch.zeros(1, dtype=torch.uint8))
    first.close()


def test_nobody_waits_for_members_once_the_push_is_not_wanted():
    wanted = iter([True, True, False])
    with pytest.raises(GlmError, match="the push has ended"):
        BroadcastGroup(Rendezvous().open(2), 0, 2, CPU, timeout_s=60, is_wanted=lambda: next(wanted))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("broadcast")
    return [save_tiny(root / str(seed), seed) for seed in (11, 12)]


@pytest.fixture(scope="module")
def models(folders):
    return [dict(glm5.load(folder, dtype="float32").state_dict()) for folder in folders]


def answer(llm) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_gets_weights_by_a_collective(folders, models, ranks, monkeypatch):
    with LLM(folders[0], device="cpu", max_num_seqs=4, tensor_parallel_size=ranks) as llm:
        first = answer(llm)
        with pytest.raises(RequestError, match="allowed: auto, memory or collective"):
            llm.update_weights(models[1], channel="nvlink")
        assert llm.update_weights(models[1]) == 1
        want = answer(llm)
        assert want != first
        for version in (2, 4):  # the second push meets the first one's group
            assert llm.update_weights(models[0], channel="collective") == version
            assert answer(llm) == first
            assert llm.update_weights(models[1], channel="collective") == version + 1
            assert answer(llm) == want
        # What is refused before a byte was sent harms nothing, and the next push makes a group of its own.
        with pytest.raises(CheckpointError, match="nothing"):
            llm.update_weights({"model.nothing.weight": torch.zeros(3)}, channel="collective")
        assert answer(llm) == want
        assert llm.update_weights(models[0], channel="collective") == 6
        assert answer(llm) == first
        # A wrong byte on the way is found.
        monkeypatch.setattr("glm5.checkpoint.broadcaster.checksum", lambda data: 1)
        with pytest.raises(CheckpointError, match="wrong checksum"):
            llm.update_weights(models[1], channel="collective")
        monkeypatch.undo()
        assert llm.update_weights(models[1], channel="collective") == 7
        assert answer(llm) == want


def test_an_engine_that_is_killed_at_a_broadcast_ends_it(folders, models, monkeypatch):
    with LLM(folders[0], device="cpu", max_num_seqs=4) as llm:
        send = BroadcastGroup.broadcast

        def kill_first(group, data, is_wanted):
            os.kill(llm.client.link.pid, signal.SIGKILL)
            send(group, data, is_wanted)

        monkeypatch.setattr(BroadcastGroup, "broadcast", kill_first)
        with pytest.raises(EngineDead, match="SIGKILL"):
            llm.update_weights(models[1], channel="collective")
    for thread in threading.enumerate():
        if thread.name == "glm5-push":
            thread.join(60)
            assert not thread.is_alive()
