"""An engine over several processes: the same answers as one of a single process, and the same fate for all of them."""

import asyncio
import os
import re
import select
import signal
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from glm5.checkpoint.init import write_random
from glm5.checkpoint.load import load
from glm5.common.errors import CheckpointError, ConfigError, EngineDead, RequestError
from glm5.config.engine import EngineConfig
from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.build import build_for
from glm5.engine.distributed.ranks import Ranks
from glm5.engine.joined import JoinedLLM, forget, share
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.failure import HUNG, LOST
from glm5.engine.transport.joined import JoinedLink
from glm5.engine.transport.wire import Dead, Start
from tests.support.models import random_model

SIZES = {"max_model_len": 320, "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(40)), [9] * 20]
BUDGET = 2e-3  # of log-probabilities: float32, sums over two or four parts; rounding alone gives 1e-5
SECONDS = 60
STOPPED = "; it was stopped, and has been killed"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("ranks") / "tiny"
    write_random(preset("tiny"), path, seed=3, dtype="float32")
    return str(path)


@pytest.fixture(scope="module")
def alone(checkpoint):
    """In this process."""
    with LLM(load(checkpoint), num_speculative_tokens=2, adaptive_speculation=False, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(checkpoint):
    """Two ranks that draft, without a CPU's way of running steps: launched ahead. With few pages, and others behind."""
    options = {"num_speculative_tokens": 2, "adaptive_speculation": False, "async_scheduling": True}
    options |= {"num_gpu_blocks_override": 12, "kv_offloading_size": 0.05}
    with LLM(checkpoint, tensor_parallel_size=2, **options, **SIZES) as llm:
        yield llm


def answers(llm, params=GREEDY, prompts=PROMPTS):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def assert_same(got, want):
    assert tokens(got) == tokens(want)
    for ours, whole in zip(got, want, strict=True):
        for own, known in zip(ours.outputs[0].logprobs, whole.outputs[0].logprobs, strict=True):
            assert own.keys() == known.keys()
            assert all(abs(own[token].logprob - known[token].logprob) < BUDGET for token in own)
        for own, known in zip((ours.prompt_logprobs or [])[1:], (whole.prompt_logprobs or [])[1:], strict=True):
            assert all(abs(own[token].logprob - known[token].logprob) < BUDGET for token in own)


def ranks_of(llm) -> list[int]:
    """Process ids of an engine's ranks, the first's excepted."""
    return [child.pid for child in psutil.Process(llm.client.link.pid).children()]


def test_two_ranks_answer_as_one(two, alone):
    ranks = dict(two.table)["ranks"]
    assert re.fullmatch(r"2, tensor parallel, on CPUs; read 0\.\d\d GB in \d+\.\d s, \d+\.\d\d GB/s", ranks)
    assert_same(answers(two), answers(alone))
    drafts = two.stats()["speculation"]
    assert drafts["drafted"][0] > 0
    assert drafts["accepted"] == alone.stats()["speculation"]["accepted"]


@pytest.mark.slow  # parts for four: test_apply.py
def test_four_ranks_answer_as_one(checkpoint, alone):
    with LLM(checkpoint, tensor_parallel_size=4, num_speculative_tokens=1, **SIZES) as llm:
        assert_same(answers(llm, GREEDY.but(max_tokens=4)), answers(alone, GREEDY.but(max_tokens=4)))


def test_sampled_answers_are_those_of_one(two, alone):
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, frequency_penalty=0.2, seed=5, max_tokens=10, n=2)
    params = params.but(ignore_eos=True, logit_bias={3: 1.0})
    for ours, whole in zip(answers(two, params), answers(alone, params), strict=True):
        assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in whole.outputs]


def test_clients_of_other_processes_are_answered_by_all_ranks(two, alone, checkpoint):
    """As with --api-server-count. What one of them leaves behind is aborted on every rank, or they would differ."""
    params = GREEDY.but(logprobs=None, prompt_logprobs=None)
    (want,) = tokens(answers(alone, params, PROMPTS[1:2]))

    async def answer(engine):
        async with engine.generate(PROMPTS[1], params) as deltas:
            return [token_id async for delta in deltas for token_id in delta.token_ids]

    async def leave(engine):
        async with engine.generate(PROMPTS[0], params.but(max_tokens=300)) as deltas:
            await anext(deltas)
            forget(two.client.link, 1)
            return await answer(engines[1])

    with tempfile.TemporaryDirectory(dir="/tmp") as folder, ExitStack() as stack:
        share(two.client.link, folder)
        links = [JoinedLink(folder, client) for client in (1, 2)]
        given = {"generation_config": "vllm", "seed": 0, "table": []}
        llms = [JoinedLLM(link, Path(checkpoint), **given) for link in links]
        engines = [stack.enter_context(AsyncEngine(llm)) for llm in llms]
        assert [asyncio.run(answer(engine)) for engine in engines] == [want, want]
        assert asyncio.run(leave(engines[0])) == want
        assert two.stats()["decoding"] == 0


def test_pages_from_the_host_reach_every_rank(two, alone):
    """Stored by the first rank. Without them others would draw other tokens, and the engine would end."""
    prompts = [[3 + number, *range(300)] for number in range(4)]
    params = GREEDY.but(prompt_logprobs=None)
    # One after the other: each needs the pages of another.
    first, *_, again = (answers(two, params, [prompt]) for prompt in (*prompts, prompts[0]))
    assert_same(first, answers(alone, params, prompts[:1]))
    assert_same(again, first)
    assert two.stats()["prefix_cache"]["hit_tokens"]["host"] >= 192


def test_requests_come_and_go_on_every_rank(two, alone):
    for delta in two.stream([1, 2, 3], GREEDY.but(max_tokens=50)):  # leaving it aborts the request
        assert delta.token_ids
        break
    assert_same(answers(two, prompts=PROMPTS[::-1]), answers(alone, prompts=PROMPTS[::-1]))


@torch.no_grad()
def test_new_weights_sleep_and_wake(two, alone, tmp_path):
    before = tokens(answers(two))
    other = {name: tensor.contiguous() for name, tensor in random_model(5, two.cfg).state_dict().items()}
    assert two.update_weights(other) == alone.update_weights(other)
    after = answers(alone)
    assert tokens(after) != before
    assert_same(answers(two), after)
    some = {
        "lm_head.weight": -other["lm_head.weight"],
        "model.layers.1.mlp.experts.3.down_proj.weight": torch.zeros(64, 32),
    }
    broken = some | {"lm_head.weight": torch.full_like(other["lm_head.weight"], torch.nan)}
    with pytest.raises(CheckpointError, match="NaN"):
        two.update_weights(broken)
    assert two.update_weights(some, policy="keep") == alone.update_weights(some, policy="keep")
    assert_same(answers(two), answers(alone))
    assert two.sleep(1) > 0
    two.wake_up()
    assert_same(answers(two), answers(alone))
    two.sleep(2)
    two.wake_up()
    assert tokens(answers(two)) == before


def test_a_row_without_a_possible_token_is_one_requests_fault(two, alone):
    """The only token that is allowed may not come yet, so all of them are barred."""
    params = SamplingParams(temperature=1.0, max_tokens=8, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=3)
    before = answers(two)
    for llm in (two, alone):
        with pytest.raises(RequestError, match="no token"):
            llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert_same(answers(two), before)


def start(checkpoint, **config) -> Start:
    return Start(checkpoint, EngineConfig(**SIZES, **config).model_dump(), "auto", "cpu", None, None)


def test_what_cannot_be_dealt_out_is_refused(checkpoint):
    """Before another process is started."""
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 3, which does not divide .* 1, 2, 4$"):
        build_for(start(checkpoint, tensor_parallel_size=3), lambda *_: None)
    with pytest.raises(ConfigError, match="allowed for a model in memory: 1"):
        LLM(random_model(3), tensor_parallel_size=2, **SIZES)


def lost(llm, rank, number) -> str:
    """Why the engine says that it ended when a rank got a signal."""
    requests = iter(llm.stream([1, 2, 3], GREEDY.but(max_tokens=100)))
    next(requests)
    os.kill(rank, number)
    with pytest.raises(EngineDead) as caught:
        list(requests)
    assert llm.client.link.process.poll() is not None
    return caught.value.reason


def ends(rank: int) -> bool:
    """Whether a process ends within SECONDS."""
    try:
        watch = os.pidfd_open(rank)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    ended = bool(poller.poll(SECONDS * 1000))
    os.close(watch)
    return ended


class Mute:
    """A rank that says nothing, last heard of `seconds_silent` seconds ago."""

    def __init__(self, number, seconds_silent):
        self.number, self.seconds_silent, self.has_sent = number, seconds_silent, True
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    def send(self, order: bytes) -> None:
        pass


class OwnProcess(list):
    """What it was ended with."""

    def end(self, death, code):
        self.append((death.reason, code))


@pytest.fixture
def mutes(monkeypatch):
    """Two of three ranks: the second was heard of a moment ago, the third is stopped, and was not for most of the time
    that a step may take."""
    made = {}
    monkeypatch.setattr("glm5.engine.distributed.ranks._CAUSE_SECONDS", 0.0)
    monkeypatch.setattr(
        "glm5.engine.distributed.ranks._Rank",
        lambda number, _: made.setdefault(number, Mute(number, {1: 0.1, 2: 3.0}[number])),
    )
    life = OwnProcess()
    ranks = Ranks(start("nowhere", watchdog_timeout=4.0), 3, 0, life)
    os.kill(made[2].process.pid, signal.SIGSTOP)
    os.waitpid(made[2].process.pid, os.WUNTRACED)
    yield ranks, life
    for rank in made.values():
        with rank.process as process:
            process.kill()


def test_a_step_that_hangs_is_laid_to_the_rank_that_was_silent(mutes):
    ranks, life = mutes
    assert ranks.cause_of_hang(2) is None
    said = (
        "rank 2 of 3: its process sent no heartbeat for 3.0 s, while a step of rank {} hung (watchdog_timeout is 4 s)"
    )
    assert ranks.cause_of_hang(0) == said.format(0) + STOPPED
    ranks.rank_exited(1, Dead("a step hung for 4.1 s"), HUNG)
    assert life == [(said.format(1) + STOPPED, LOST)]


def test_a_step_that_hangs_while_all_are_alive_is_that_ranks(mutes):
    ranks, life = mutes
    ranks.rank_exited(2, Dead("a step hung for 4.1 s"), HUNG)
    assert life == [("rank 2 of 3: a step hung for 4.1 s", LOST)]


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_engine(checkpoint):
    """It says nothing, nor can the first rank go on, whose watchdog may be the one to notice; it does not live on."""
    llm = LLM(checkpoint, tensor_parallel_size=2, watchdog_timeout=4.0, **SIZES)
    (rank,) = ranks_of(llm)
    said = r"rank 1 of 2: its process sent no heartbeat for .* s(, while a step of rank 0 hung)? "
    assert re.fullmatch(said + r"\(watchdog_timeout is 4 s\)" + STOPPED, lost(llm, rank, signal.SIGSTOP))
    assert ends(rank)


@pytest.mark.slow
def test_ranks_end_with_the_first(checkpoint):
    llm = LLM(checkpoint, tensor_parallel_size=2, **SIZES)
    (rank,) = ranks_of(llm)
    llm.client.link.kill()
    assert ends(rank)


def test_a_rank_that_is_killed_ends_the_engine(two):
    """The last test here: nothing is left of the module's engine."""
    (rank,) = ranks_of(two)
    why = "its process was killed by SIGKILL (by hand, or by the system for lack of memory)"
    assert lost(two, rank, signal.SIGKILL) == f"rank 1 of 2: {why}"
    assert ends(rank)
