"""An engine core over the runner without a model, driven by hand, whose answers are checked as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from glm5.engine.core.depth import AdaptiveDepth
from glm5.engine.core.engine_core import EngineCore
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.tiers import CopyQueue, DiskTier, HostTier, layout_of, page_io
from glm5.engine.transport.wire import AddRequest, Answer, EngineInfo, RoutedExperts, Update, Updates
from tests.support.fake_runner import FakeRunner, FakeWeights, lone_run
from tests.support.updates import updates_of

MAX_TURNS = 5000


@dataclass
class ReceivedAnswer:
    """All updates of one answer, with its request (`ask`) and seed."""

    ask: AddRequest
    seed: int
    token_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    routed: list[RoutedExperts] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        return self.updates[-1].finish_reason if self.updates else None

    @property
    def error(self) -> str | None:
        return self.updates[-1].error

    @property
    def num_cached(self) -> int | None:
        return next((update.num_cached for update in self.updates if update.token_ids), None)

    def experts(self) -> dict[int, list[int]]:
        """By token position. AssertionError where one is reported twice."""
        found: dict[int, list[int]] = {}
        for routed in self.routed:
            rows = np.frombuffer(routed.experts, dtype="<i2").reshape(routed.shape[0], -1).tolist()
            for position, row in enumerate(rows, start=routed.start):
                assert position not in found, f"experts of {position=} were reported twice"
                found[position] = row
        return found


class CoreDriver:
    """Small pages, few of them; `tiers` True puts a host tier behind, a path a disk tier too. `core`: more of
    `EngineCore`'s."""

    def __init__(
        self, *, tiers=None, host_pages: int = 64, compiler=None, adaptive=None, draft_quality=5, core=None, **options
    ):
        defaults = {
            "page_size": 4,
            "num_pages": 100,
            "max_num_seqs": 8,
            "max_tokens_per_step": 64,
            "max_model_len": 200,
            "headroom": 0.0,
            "tiers": tiers is not None,
        }
        self.config = SchedulerConfig(**defaults | options)
        self.vocab_size = 50 if compiler is None else compiler._vocabulary.size
        self.weights = FakeWeights()
        self.runner = FakeRunner(
            self.weights,
            num_pages=self.config.num_pages,
            page_size=self.config.page_size,
            vocab_size=self.vocab_size,
            max_depth=self.config.max_depth,
            draft_quality=draft_quality,
        )
        self.copies = self._copies(tiers, host_pages) if tiers is not None else None
        info = EngineInfo(
            self.config.page_size,
            self.config.num_pages,
            self.config.max_num_seqs,
            self.config.max_tokens_per_step,
            self.config.max_model_len,
            self.config.max_depth,
            self.vocab_size,
            max_logprobs=20,
            routed_experts=True,
            table=[],
        )
        self.core = EngineCore(
            self.runner,
            self.config,
            info,
            weights=self.weights,
            cache=self.runner,
            compiler=compiler,
            copies=self.copies,
            depth=AdaptiveDepth(self.config.max_depth, adaptive) if adaptive is not None else None,
            **core or {},
        )
        self.received: dict[int, ReceivedAnswer] = {}
        self.answers: dict[int, Answer] = {}
        self.num_turns = 0

    def ask(
        self, prompt: Sequence[int] | int, max_tokens: int = 8, *, n: int = 1, seed: int = 1, **options
    ) -> list[int]:
        """Ask for n answers; their ids. A number is a prompt of so many tokens. Options: of `AddRequest` or params."""
        first = len(self.received)
        ids = tuple(range(first, first + n))
        own = {name: options.pop(name) for name in list(options) if name in AddRequest.__struct_fields__}
        ask = AddRequest(
            seq_ids=ids,
            prompt_ids=self.prompt(prompt, first) if isinstance(prompt, int) else list(prompt),
            params=own.pop("params", None) or SamplingParams(max_tokens=None, **options),
            seeds=tuple(seed + i for i in range(n)),
            max_tokens=max_tokens,
            **own,
        )
        for seq_id, own_seed in zip(ids, ask.seeds, strict=True):
            self.received[seq_id] = ReceivedAnswer(ask, own_seed)
        self.core.receive(ask)
        return list(ids)

    def prompt(self, num_tokens: int, number: int = 0) -> list[int]:
        return [(7 * i + 13 * number + i * i) % self.vocab_size for i in range(num_tokens)]

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.num_turns += 1
            assert self.num_turns < MAX_TURNS, f"no end in sight: {self.core.stats()}"
            for message in self.core.step():
                if isinstance(message, Updates):
                    for update in updates_of(message):
                        self._hear(update)
                else:
                    assert isinstance(message, Answer)
                    assert message.call_id not in self.answers
                    self.answers[message.call_id] = message

    def run(self) -> None:
        """Until there is no work."""
        while self.core.has_work:
            self.turn()

    def call(self, message) -> Answer:
        """Send a call and take turns until it is answered."""
        self.core.receive(message)
        while message.call_id not in self.answers:
            assert self.core.has_work, "nobody will answer"
            self.turn()
        return self.answers[message.call_id]

    def expected(self, seq_id: int, weights: int = 0) -> list[int]:
        """The answer of a sequence that has the engine to itself."""
        received = self.received[seq_id]
        ask = received.ask
        room = min(ask.max_tokens, self.config.max_model_len - len(ask.prompt_ids))
        stops = ask.stop_ids, ask.params.min_tokens
        return lone_run(ask.prompt_ids, received.seed, room, self.vocab_size, *stops, weights)

    def check(self, *seq_ids: int) -> None:
        """These answers are complete, and those of their lone runs."""
        for seq_id in seq_ids or self.received:
            received = self.received[seq_id]
            assert received.reason in ("stop", "length"), (
                f"{seq_id}: {received.reason} {received.error if received.updates else ''}"
            )
            assert received.token_ids == self.expected(seq_id), seq_id

    def check_empty(self) -> None:
        """Nothing is left behind."""
        core = self.core
        assert not core.has_work
        kept = core._replies, core._specs, core._reports, core._constrained, core._unread, core.scheduler.live
        assert not any(kept), kept
        pool = core.scheduler.page_manager.pool
        assert pool.num_available == pool.num_pages

    def _hear(self, update: Update) -> None:
        received = self.received[update.seq_id]
        assert received.reason is None, f"{update.seq_id} is over: {update}"
        received.updates.append(update)
        received.token_ids += update.token_ids
        received.versions += [update.version] * len(update.token_ids)
        if update.logprobs is not None:
            assert [entry.token_id for entry in update.logprobs] == update.token_ids
            received.logprobs += update.logprobs
        if update.routed is not None:
            received.routed.append(update.routed)

    def _copies(self, tiers, host_pages: int) -> CopyQueue:
        layout = layout_of(self.runner.parts(), {"of": "test"})
        disk = DiskTier(tiers, 1 << 24, layout) if tiers is not True else None
        host = HostTier(host_pages * layout.num_bytes, layout)
        return CopyQueue(page_io(self.runner.parts()), host, disk)
