"""A crowd of random requests through one engine core: some leave, some stop early, all at random turns."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from glm5.chat.tokenizer import Tokenizer
from glm5.config.engine import EngineConfig
from glm5.config.presets import preset
from glm5.engine.build import build_core
from glm5.engine.core.engine_core import EngineCore
from glm5.engine.sampling import SamplingParams, StructuredOutputsParams
from glm5.engine.transport.wire import AbortRequests, AddRequest, Answer, ResetCacheCall, StopAnswer, Updates
from glm5.model.glm5 import Glm5
from tests.support.models import random_model
from tests.support.tokenizers import tiny_tokenizer
from tests.support.updates import updates_of

MAX_MODEL_LEN = 256
_GRAMMARS = (
    {"regex": "[abc]{2,9}"},
    {"choice": ["ab", "abc", "zz top"]},
    {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
)


@dataclass
class ReceivedAnswer:
    """What became of one answer. `left`: its client went, so nothing is promised of it."""

    ask: AddRequest
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    reason: str | None = None
    left: bool = False


class Crowd:
    """`num_requests` random ones, their prompts with common beginnings; the same for the same `rng`."""

    def __init__(self, rng: Random, num_requests: int, tokenizer: Tokenizer, vocab_size: int):
        self.rng = rng
        bases = [[rng.randrange(4, vocab_size) for _ in range(rng.randint(20, 150))] for _ in range(8)]
        self.asks: list[AddRequest] = []
        next_id = 0
        for _ in range(num_requests):
            base = rng.choice(bases)
            prompt = base[: rng.randint(0, len(base))] + [
                rng.randrange(4, vocab_size) for _ in range(rng.randint(1, 60))
            ]
            ids = tuple(range(next_id, next_id + rng.choice([1, 1, 1, 1, 2, 3])))
            next_id += len(ids)
            params = self._params(len(ids))
            self.asks.append(
                AddRequest(
                    ids,
                    prompt,
                    params,
                    seeds=tuple(rng.getrandbits(64) for _ in ids),
                    max_tokens=params.max_tokens or 1,
                    stop_ids=tokenizer.eos_ids,
                    priority=rng.choice([0, 0, 0, 1, 2]),
                    salt=rng.choice([b"", b"", b"tenant"]),
                )
            )

    def _params(self, n: int) -> SamplingParams:
        rng = self.rng
        greedy = n == 1 and rng.random() < 0.3
        grammar = StructuredOutputsParams(**rng.choice(_GRAMMARS)) if rng.random() < 0.1 else None
        return SamplingParams(
            temperature=0.0 if greedy else rng.choice([0.5, 1.0, 1.3]),
            top_k=rng.choice([0, 0, 30]),
            top_p=rng.choice([1.0, 0.9]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            max_tokens=rng.choice([1, 4, 8, 16, 24]),
            logprobs=rng.choice([None, 0, 2]),
            structured_outputs=grammar,
        )

    def run(self, core: EngineCore) -> dict[int, ReceivedAnswer]:
        """All of them, a few at each turn. One in ten is aborted at some turn, one in ten stopped by its client."""
        rng, received, waiting = self.rng, dict[int, ReceivedAnswer](), list(self.asks)
        while waiting or any(one.reason is None for one in received.values()):
            for _ in range(min(len(waiting), rng.choice([0, 0, 1, 2, 6]))):
                ask = waiting.pop(0)
                received |= {i: ReceivedAnswer(ask, seed) for i, seed in zip(ask.seq_ids, ask.seeds, strict=True)}
                core.receive(ask)
            running = [seq_id for seq_id, one in received.items() if one.reason is None]
            if running and rng.random() < 0.08:
                seq_id = rng.choice(running)
                received[seq_id].left = True
                core.receive(AbortRequests((seq_id,)))
            elif running and rng.random() < 0.08:
                # Ended by its client: no update of it follows.
                seq_id = rng.choice(running)
                received[seq_id].left, received[seq_id].reason = True, "stop"
                core.receive(StopAnswer(seq_id))
            _listen(core, received)
        return received


def alone(model: Glm5, tokenizer: Tokenizer, answers: Sequence[ReceivedAnswer]) -> list[ReceivedAnswer]:
    """The same answers, each with an engine to itself: nothing drafted, nothing launched ahead, nothing cached."""
    config = EngineConfig(
        deterministic=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        num_speculative_tokens=0,
        async_scheduling=False,
        enable_prefix_caching=False,
        num_gpu_blocks_override=MAX_MODEL_LEN // 64,
    )
    core, out = build_core(model, config, tokenizer=tokenizer), list[ReceivedAnswer]()
    for number, one in enumerate(answers):
        ask = AddRequest(
            (number,), one.ask.prompt_ids, one.ask.params, (one.seed,), one.ask.max_tokens, stop_ids=one.ask.stop_ids
        )
        received = {number: ReceivedAnswer(ask, one.seed)}
        core.receive(ask)
        while received[number].reason is None:
            _listen(core, received)
        out.append(received[number])
    core.close()
    return out


def _listen(core: EngineCore, received: dict[int, ReceivedAnswer]) -> None:
    for message in core.step():
        assert isinstance(message, Updates), f"{message=}"
        for update in updates_of(message):
            one = received[update.seq_id]
            assert one.reason is None, f"{update.seq_id} had ended with {one.reason}"
            one.token_ids += update.token_ids
            one.logprobs += [(entry.token_id, entry.logprob) for entry in update.logprobs or ()]
            one.reason = update.finish_reason
            assert update.error is None, update.error


def endure(rng: Random, num_requests: int) -> str:
    """Run a crowd on a small random model through a cache of a tenth of what it needs, then look for what is left.

    Returns what happened, in a line.
    """
    tokenizer = tiny_tokenizer()
    model = random_model(11, preset("tiny").replace(eos_token_id=tokenizer.eos_ids))
    crowd = Crowd(rng, num_requests, tokenizer, model.cfg.vocab_size)
    need = sum(len(ask.seq_ids) * -(-(len(ask.prompt_ids) + ask.max_tokens) // 64) for ask in crowd.asks)
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            deterministic=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=16,
            max_num_batched_tokens=128,
            num_gpu_blocks_override=max(MAX_MODEL_LEN // 64 + 2, min(need // 10, 40)),
            kv_offloading_size=2.0**-8,
            kv_disk_dir=folder,
            kv_disk_size=2.0**-7,
            num_speculative_tokens=3,
            adaptive_speculation=False,
            async_scheduling=True,
        )
        core = build_core(model, config, tokenizer=tokenizer)
        received = crowd.run(core)
        stats = core.stats()
        _leaves_nothing(core, Path(folder))
    whole = [one for one in received.values() if not one.left]
    for got, want in zip(whole, alone(model, tokenizer, whole), strict=True):
        assert (got.token_ids, got.reason) == (want.token_ids, want.reason), got.ask
        assert got.logprobs == want.logprobs, got.ask
    return f"{len(whole)} of {len(received)} answers whole and equal to their lone runs; {stats}"


def _leaves_nothing(core: EngineCore, folder: Path) -> None:
    """No page, tree node, file, copy or record of a request is left once all have ended and the cache is forgotten."""
    core.receive(ResetCacheCall(1))
    answers = []
    while core.has_work:
        answers += [message for message in core.step() if isinstance(message, Answer)]
    assert [answer.error for answer in answers] == [None]
    scheduler = core.scheduler
    assert not scheduler.live
    assert not scheduler.has_work
    pool = scheduler.page_manager.pool
    assert pool.num_free == pool.num_pages
    assert len(scheduler.page_manager.tree) == 0
    for record in (core._replies, core._specs, core._reports, core._constrained, core._unread):
        assert not record
    assert core.tiering is not None
    tiers = core.tiering.copies.stats()
    assert (tiers["in_flight"], tiers["host_pages"], tiers["host_leased"]) == (0, 0, 0)
    core.close()
    assert [path for path in folder.rglob("*") if path.is_file()] == []
