"""Deterministic mode: tokens and log-probabilities are bitwise the same however the work was cut, batched and cached.

The weights are those of `glm5 init --preset nano --seed 0`, computed with in float32. Every request is answered by
itself first, without cache, drafts or launch-ahead; then all of them in one engine, in one way after another. In
default mode the same is measured: a first difference may only stand where the two best choices are nearly equal.

Layers in native code give every row the same bits in either mode; layers on torch take passes of fixed shapes for it.
`make test` asks 16 requests, half of them greedy; `make long` asks 64, once greedy and once sampled.
"""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import glm5
from glm5.cli.main import main
from glm5.engine import arithmetic
from glm5.engine.sampling.noise import log_exponential
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.scheduler.config import RestoreCost
from glm5.kernels import cpu_layer, native_code
from glm5.model.glm5 import Glm5
from tests.support.real_core import Outcome, RealCore, Request

VOCAB = 700  # token ids of prompts are below
# Pages for a few requests at a time.
SCARCE = 12
# Two choices that are nearer than this may change places in default mode. Seen between sums in another order: 3e-6.
NEAR = 1e-3
SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 40, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.5, "logit_bias": {5: 2.0}},
    {"temperature": 1.2, "frequency_penalty": 0.4, "bad_words": [], "min_tokens": 4},
)


@dataclass(frozen=True)
class Crowd:
    """How many requests, of what kind, and how long the longest prompt and answer are."""

    num_requests: int
    kind: str
    longest: int
    most_tokens: int

    def requests(self) -> list[Request]:
        """Prompts of mixed lengths, many around the end of a page; some begin alike, some answers stop early."""
        rng = random.Random(0)
        stem = [rng.randrange(VOCAB) for _ in range(self.longest)]
        requests: list[Request] = []
        for number in range(self.num_requests):
            some = [rng.randint(1, 40), rng.randint(60, 66), rng.randint(124, 130), rng.randint(60, self.longest)]
            length = rng.choice(some)
            shared = rng.choice([0, 0, min(length - 1, 64), min(length - 1, 100)])
            prompt = stem[:shared] + [rng.randrange(VOCAB) for _ in range(length - shared)]
            greedy = self.kind == "greedy" or (self.kind == "mixed" and number % 2 == 0)
            how = {"temperature": 0.0} if greedy else SAMPLED[number // 2 % len(SAMPLED)]
            params = SamplingParams(max_tokens=None, logprobs=2, prompt_logprobs=1 if number % 5 == 3 else None, **how)
            stop_ids = tuple(rng.sample(range(VOCAB), 40)) if number % 3 == 2 else ()
            max_tokens = rng.randint(self.most_tokens // 2, self.most_tokens)
            requests.append(Request(prompt, params, rng.getrandbits(63), max_tokens, stop_ids))
        return requests


CROWDS = [
    pytest.param(Crowd(16, "mixed", 150, 14), id="16 mixed"),
    pytest.param(Crowd(64, "greedy", 200, 16), id="64 greedy", marks=pytest.mark.long),
    pytest.param(Crowd(64, "sampled", 200, 16), id="64 sampled", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bitwise") / "nano"
    assert main(["init", "--preset", "nano", "--seed", "0", "--out", str(folder)]) == 0
    return folder


def loaded(checkpoint: Path) -> Glm5:
    return glm5.load(checkpoint, dtype="float32")


NATIVE = pytest.param("native", marks=pytest.mark.compiler)
on_both = pytest.mark.parametrize("layers", [NATIVE, "torch"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def layers(request):
    """What the layers of this test's engines run on."""
    assert request.param == "torch" or cpu_layer.available()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(arithmetic, "use_native", lambda _model, **_: False)
        yield request.param


@pytest.fixture(scope="module")
def model(checkpoint, layers) -> Glm5:
    return loaded(checkpoint)


@pytest.fixture(scope="module", params=CROWDS)
def requests(request) -> list[Request]:
    return request.param.requests()


@pytest.fixture(scope="module")
def alone(model, requests) -> list[Outcome]:
    """Each request in an engine that has no other, computed anew."""
    return answer_alone(model, requests, deterministic=True)


def answer_alone(model: Glm5, requests: Sequence[Request], **settings: Any) -> list[Outcome]:
    settings |= {"max_num_seqs": 1, "enable_prefix_caching": False, "async_scheduling": False}
    outcomes: list[Outcome] = []
    with RealCore(model, **settings) as engine:
        for one in requests:
            outcomes += engine.answer([one])
    return outcomes


@dataclass(frozen=True)
class Way:
    """How to answer all requests: settings, the seed of their order (None: as they are), how many engines one after
    another, how often in each, and what must have been seen in the end: prompt tokens from a tier, preemptions."""

    settings: dict[str, Any] = field(default_factory=dict)
    order: int | None = None
    num_lives: int = 1
    num_rounds: int = 1
    hits: str | None = None
    is_urgent: bool = False


HOST = {"num_gpu_blocks_override": SCARCE, "kv_offloading_size": 0.1}
WAYS = {
    "batched": Way({"enable_prefix_caching": False}),
    "chunks of 7": Way({"long_prefill_token_threshold": 7}),
    "chunks of 64": Way({"long_prefill_token_threshold": 64}),
    "whole prompts": Way({"max_num_batched_tokens": 20_000}),
    "small steps": Way({"max_num_batched_tokens": 64}),
    "cold and warm": Way(num_rounds=2, hits="device"),
    "host tier": Way(HOST | {"num_speculative_tokens": 1}, num_rounds=2, hits="host"),
    "disk tier after a restart": Way({"num_gpu_blocks_override": 2 * SCARCE}, num_lives=2, hits="disk"),
    "launch-ahead off": Way({"async_scheduling": False}),
    "1 draft": Way({"num_speculative_tokens": 1}),
    "3 drafts": Way({"num_speculative_tokens": 3}),
    "5 drafts": Way({"num_speculative_tokens": 5}),
    "adaptive drafts": Way({"num_speculative_tokens": 4, "adaptive_speculation": True, "max_num_seqs": 9}),
    "preemption": Way({"max_num_seqs": 5}, is_urgent=True),
    "preemption, 3 drafts": Way({"max_num_seqs": 5, "num_speculative_tokens": 3}, is_urgent=True),
    "an order": Way(order=1),
    "another order": Way(order=2),
    "one by one": Way({"max_num_seqs": 1, "num_speculative_tokens": 3, "num_gpu_blocks_override": 2 * SCARCE}),
    "all at once": Way(
        HOST | {"max_num_seqs": 5, "num_speculative_tokens": 3, "long_prefill_token_threshold": 20},
        order=3,
        num_lives=2,
        hits="disk",
        is_urgent=True,
    ),
}


# On torch each takes ten times as long: in `make test` the one that combines most, in `make soak` others that combine.
ON_TORCH = {"all at once": (), "disk tier after a restart": pytest.mark.slow, "preemption, 3 drafts": pytest.mark.slow}
PAIRS = [pytest.param("native", way, marks=pytest.mark.compiler) for way in WAYS] + [
    pytest.param("torch", way, marks=ON_TORCH.get(way, pytest.mark.long)) for way in WAYS
]


@pytest.mark.parametrize(("layers", "way"), PAIRS, indirect=["layers"], scope="module")
def test_every_bit_is_the_same(way, layers, model, checkpoint, requests, alone, tmp_path, monkeypatch):
    way, settings = WAYS[way], {"deterministic": True, **WAYS[way].settings}
    if way.hits in ("host", "disk"):
        # Whatever lies behind the device is brought back, however cheap it would be to compute.
        monkeypatch.setattr(RestoreCost, "num_pages", lambda _self, tiers, _page_size: len(tiers))
    if way.hits == "disk":
        settings["kv_disk_dir"] = str(tmp_path / "pages")
    order = list(range(len(requests)))
    if way.order is not None:
        random.Random(way.order).shuffle(order)
    # Short ones, which are over before they are asked for again: the others must go on.
    shortest = sorted(requests, key=lambda one: len(one.prompt_ids))[:4] if way.is_urgent else []
    urgent = [dataclasses.replace(one, max_tokens=1) for one in shortest]
    want = [alone[i] for i in order], answer_alone(model, urgent, deterministic=True)
    for life in range(way.num_lives):
        with RealCore(model if life == 0 else loaded(checkpoint), checkpoint, **settings) as engine:
            for _ in range(way.num_rounds):
                got = engine.answer([requests[i] for i in order], urgent)
                check(got, (want[0] + want[1] * len(got))[: len(got)])
            print(f"{engine.num_steps} steps, {engine.num_preempted} preemptions, prompt tokens found: {engine.hits}")
    if way.hits is not None:
        assert engine.hits[way.hits] >= 4 * 64
    if way.is_urgent:
        assert engine.num_preempted > engine.num_steps / 8


def check(got: Sequence[Outcome], want: Sequence[Outcome]) -> None:
    """Every bit of every answer. (Log-probabilities are float32 in Python's floats.)"""
    unlike = [
        f"{number}: {name} is {getattr(one, name)}, alone {getattr(other, name)}"
        for number, (one, other) in enumerate(zip(got, want, strict=True))
        for name in vars(other)
        if getattr(one, name) != getattr(other, name)
    ]
    assert not unlike, f"{len(unlike)} differences, the first in answer {unlike[0][:2000]}"


@on_both
@pytest.mark.parametrize("deterministic", [True, False])
def test_pages_of_other_arithmetic_are_no_hits_in_deterministic_mode(
    deterministic, layers, model, checkpoint, tmp_path, monkeypatch
):
    """Another compiler, or on torch another processor or number of threads, may give other bits. Default mode takes
    any."""
    monkeypatch.setattr(RestoreCost, "num_pages", lambda _self, tiers, _page_size: len(tiers))
    request = Request([*range(4, 70)], SamplingParams(max_tokens=None, temperature=0.0), 1, 2)
    num_found: list[int] = []
    for number in (1, 1, 3, 4):
        if layers == "torch":
            monkeypatch.setattr(torch, "get_num_threads", lambda num=number: min(num, 3))
            monkeypatch.setattr(native_code, "processor", lambda num=number: f"processor {max(num, 3)}")
        else:
            monkeypatch.setattr(cpu_layer, "identity", lambda num=number: f"compiler {num}")
        with RealCore(model, checkpoint, deterministic=deterministic, kv_disk_dir=str(tmp_path)) as engine:
            engine.answer([request])
            num_found.append(engine.hits["disk"])
    assert num_found == [0, 64, *[0 if deterministic else 64] * 2]


@on_both
def test_what_is_compared_says_something(requests, alone):
    """Answers of all kinds of endings, with all their log-probabilities, no two alike."""
    assert {outcome.reason for outcome in alone} == {"stop", "length"}
    assert len({tuple(outcome.token_ids) for outcome in alone}) == len(alone)
    for one, outcome in zip(requests, alone, strict=True):
        assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids
        assert all(len(entry.likeliest) == 2 for entry in outcome.logprobs)
        assert len(outcome.prompt_logprobs) == (0 if one.params.prompt_logprobs is None else len(one.prompt_ids) - 1)


DEFAULT_WAYS = ("batched", "chunks of 7", "3 drafts", "adaptive drafts")


@on_both
def test_in_default_mode_answers_differ_where_two_choices_are_near(layers, checkpoint, requests):
    """Greedy requests, and those sampled at a temperature alone. In native code there is no difference at all."""
    model = loaded(checkpoint)
    plain = [one for one in requests if not one.params.logit_bias and one.params.top_k in (-1, 0)]
    plain = [one for one in plain if one.params.top_p == 1 and one.params.min_p == 0 and not one.params.min_tokens]
    want = answer_alone(model, plain)
    num_unlike = num_logprobs = 0
    largest = 0.0
    for way in DEFAULT_WAYS:
        with RealCore(model, **WAYS[way].settings) as engine:
            outcomes = engine.answer(plain)
        for request, got, one in zip(plain, outcomes, want, strict=True):
            place = first_difference(got, one)
            num_logprobs += got.logprobs != one.logprobs
            if place is not None:
                num_unlike += 1
                assert abs(worth(request, got, place) - worth(request, one, place)) < NEAR
            for a, b in list(zip(got.logprobs, one.logprobs, strict=False))[:place]:
                largest = max(largest, abs(a.logprob - b.logprob))
    num = len(DEFAULT_WAYS) * len(plain)
    print(f"default mode: of {num} answers {num_unlike} differ in a token, {num_logprobs} in a log-probability's bits")
    print(f"the largest difference of a log-probability is {largest:.1e}")
    assert largest < NEAR
    # The control on torch: were nothing to differ, deterministic mode could not be told from it.
    assert (num_logprobs > 0) == (layers == "torch")


def first_difference(got: Outcome, want: Outcome) -> int | None:
    pairs = zip(got.token_ids, want.token_ids, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), None)


def worth(request: Request, outcome: Outcome, place: int) -> float:
    """By which the token there was chosen: the largest log-probability, or that beside noise of seed and position."""
    entry, temperature = outcome.logprobs[place], request.params.temperature
    if temperature == 0:
        return entry.logprob
    seed, position = torch.tensor([request.seed]), torch.tensor([len(request.prompt_ids) + place])
    return entry.tempered - log_exponential(seed, position, VOCAB * 2)[0, entry.token_id].item()
