"""A random life of a scheduler: requests, messages, copies and results, checked at every step.

Now and then there are two replicas that are told the same and must decide the same. At the end everything is drained:
every sequence ends, its answer is that of its lone run (the start of it when it was aborted), and nothing is left.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from glm5.engine.cache.prefix import cache_salt, page_keys
from glm5.engine.scheduler.config import RestoreCost, SchedulerConfig
from glm5.engine.scheduler.messages import (
    Abort,
    CopyDone,
    Finish,
    Message,
    Pause,
    ResetCache,
    Resume,
    SetDepth,
    SetPromptShare,
    SetWeights,
    Submit,
    Tier,
    TierChange,
)
from glm5.engine.scheduler.plan import Output, StepPlan
from glm5.engine.scheduler.scheduler import Scheduler
from tests.support.scheduling.audit import audit, audit_empty
from tests.support.scheduling.device import VOCAB, Device, hashes, lone_run
from tests.support.scheduling.plans import Before, Known, check_plan, in_order

MAX_STEPS = 4000


@dataclass
class Rates:
    """Probabilities a step, and what requests look like."""

    num_requests: int = 8
    submit: float = 0.5
    abort: float = 0.05
    finish: float = 0.05
    control: float = 0.1
    copy: float = 0.5
    priorities: int = 3
    max_n: int = 3
    acceptance: float = 0.6


def random_config(rng: Random) -> SchedulerConfig:
    """Small enough that everything runs out now and then."""
    page_size = rng.choice((1, 2, 4, 4, 8))
    max_num_seqs = rng.randint(1, 6)
    has_cache = rng.random() < 0.8
    return SchedulerConfig(
        page_size=page_size,
        num_pages=rng.randint(4, 60 // page_size + 4),
        max_num_seqs=max_num_seqs,
        max_tokens_per_step=max_num_seqs + rng.choice((0, 1, 4, 10, 40)),
        max_model_len=rng.randint(12, 50),
        max_depth=rng.choice((0, 0, 1, 3, 5)),
        launch_ahead=rng.random() < 0.7,
        prefix_cache=has_cache,
        max_prompt_chunk=rng.choice((None, None, 3, 7)),
        full_prompt=rng.choice((0, 0, 4, 12)),
        headroom=rng.choice((0.0, 0.0, 0.1, 0.3)),
        tiers=has_cache and rng.random() < 0.6,
        restore_cost=rng.choice((RestoreCost(0, 0, 0), RestoreCost(0.5, 2, 1))),
        max_loads=rng.choice((1, 2, 8)),
        max_stores=rng.choice((1, 2, 8)),
        batch_buckets=(1, 2, 4),
        token_buckets=(4, 8, 16),
    )


def identity(version: int) -> bytes:
    """Of the weights."""
    return b"%d" % version if version else b""


def set_weights(versions: list[int], recompute: bool, max_key_age: int) -> SetWeights:
    """`versions`: those that sessions may use, the current one last."""
    versions.append(versions[-1] + 1)
    del versions[: -1 - max_key_age]
    return SetWeights(versions[-1], recompute, identity(versions[-1]), max_key_age)


class World:
    """`make` builds the scheduler under test."""

    def __init__(
        self,
        seed: int,
        config: SchedulerConfig | None = None,
        rates: Rates | None = None,
        make: Callable[..., Scheduler] = Scheduler,
    ):
        self.rng = Random(seed)
        self.config = config or random_config(self.rng)
        self.rates = rates or Rates()
        self.scheduler = make(self.config)
        self.replica = make(self.config) if seed % 4 == 0 else None
        acceptance = self.rng.choice((0.0, self.rates.acceptance, 1.0))
        self.device = Device(self.rng, self.config, is_lazy=self.rng.random() < 0.7, acceptance=acceptance)
        self.documents = [[self.rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
        self.known: dict[int, Known] = {}
        self.unread: list[StepPlan] = []
        self.step = 0
        self.num_submitted = self.num_preempted = self.num_ended = self.num_old_hits = 0
        self.versions = [0]  # those that sessions may use, the current one last
        self.is_paused = False
        self.copies_ended: dict[int, Tier | None] = {}
        self._fill_tiers()

    @property
    def version(self) -> int:
        return self.versions[-1]

    def run(self) -> "World":
        """Live, then drain. AssertionError when something does not hold."""
        while self.num_submitted < self.rates.num_requests or self.rng.random() < 0.9:
            self._advance(self._random_messages())
            assert self.step < MAX_STEPS, "no end in sight"
        limit = self.step + MAX_STEPS
        self._deliver([Resume()])
        self.is_paused = False
        while self.scheduler.has_work:
            self._advance([])
            assert self.step < limit, f"{self.scheduler.live} do not end"
        self.device.sync()
        audit_empty(self.scheduler)
        for seq_id, known in self.known.items():
            assert known.reason is not None, f"{seq_id} never ended"
        self._deliver([ResetCache()])
        self._advance([])
        pool = self.scheduler.page_manager.pool
        assert (pool.num_free, len(self.scheduler.page_manager.tree._roots)) == (pool.num_pages, 0)
        return self

    def _advance(self, messages: list[Message]) -> None:
        self._deliver(messages)
        before = Before.of(self.scheduler)
        plan = self.scheduler.plan(self.step)
        assert self.replica is None or self.replica.plan(self.step) == plan, "replicas decide differently"
        self.step += 1
        self.num_preempted += len(plan.preempted)
        audit(self.scheduler)
        check_plan(self.config, self.scheduler, plan, before, self.known)
        self._check_control(plan, before, messages)
        self._check_wait(plan)
        self._end(plan.ended)
        self.device.launch(plan, {seq_id: known.submit for seq_id, known in self.known.items()})
        self._check_tables(plan)
        if Pause(release=True) in messages:
            self.copies_ended |= self.device.sleep()
        if plan.items:
            self.unread.append(plan)
            for item in plan.items:
                self.known[item.seq_id].unread.append(item)
        num_ahead = 1 if self.config.launch_ahead and plan.wait != "results" else 0
        while len(self.unread) > num_ahead:
            self._apply(self.unread.pop(0))

    def _deliver(self, messages: list[Message]) -> None:
        """Some take effect a step later than they could."""
        for message in [*self._copies(), *messages]:
            step = self.step + (isinstance(message, Abort | Finish | SetDepth) and self.rng.random() < 0.3)
            self.scheduler.deliver(step, [message])
            if self.replica is not None:
                self.replica.deliver(step, [message])

    def _apply(self, plan: StepPlan) -> None:
        if plan.step not in self.device.results:
            self.device.sync()
        results = self.device.results.pop(plan.step)
        wanted = [item.seq_id for item in plan.items if item.samples and item.seq_id in self.scheduler.live]
        for item in plan.items:
            self.known[item.seq_id].unread.remove(item)
        applied = self.scheduler.apply(plan.step, results)
        assert self.replica is None or self.replica.apply(plan.step, results) == applied, "replicas decide differently"
        outputs = in_order(plan, applied)
        audit(self.scheduler)
        assert [output.seq_id for output in outputs] == wanted, "tokens are lost"
        self._end(outputs)

    def _end(self, outputs: list[Output]) -> None:
        for seq_id, token_ids, reason in outputs:
            known = self.known[seq_id]
            assert known.reason is None, f"{seq_id} had ended: {known.reason}"
            known.tokens += token_ids
            assert known.tokens == known.answer[: len(known.tokens)], f"{seq_id} differs from its lone run"
            if reason is not None:
                known.reason = reason
                self.num_ended += 1
                assert seq_id not in self.scheduler.live
            elif token_ids:
                assert len(known.tokens) < len(known.answer), f"{seq_id} should have ended"
            if reason in ("length", "stop") and token_ids:
                assert known.tokens == known.answer, f"{seq_id} ended early"

    def _check_control(self, plan: StepPlan, before: Before, messages: list[Message]) -> None:
        """What messages ask for has happened."""
        assert plan.version == self.version
        assert not (self.is_paused and plan.items), "a paused scheduler planned"
        updates = [message for message in messages if isinstance(message, SetWeights)]
        if Pause(release=True) in messages or any(message.recompute for message in updates):
            gone = {*plan.preempted, *(output.seq_id for output in plan.ended)}
            assert gone >= before.running.keys(), "sequences go on with pages that are worth nothing"
        for seq_id, versions in plan.key_versions.items():
            is_new = seq_id in {entry.seq_id for entry in plan.entered}
            assert not is_new or set(versions) <= set(self.versions), "keys are too old"
        self.num_old_hits += sum(bool(set(of) - {self.version}) for of in plan.key_versions.values())
        if any(not message.recompute for message in updates):
            assert not any(entry.hit_device for entry in plan.entered), "the prefix tree was not emptied"

    def _check_wait(self, plan: StepPlan) -> None:
        if plan.items:
            assert plan.wait is None
            return
        reasons = {
            "results": bool(self.unread),
            "pause": self.is_paused,
            "copies": bool(self.device.copies or self.copies_ended or plan.loads or plan.stores),
            "requests": not self.scheduler.live,
        }
        assert plan.wait is not None
        assert reasons[plan.wait], f"{plan.wait=} but {reasons}"

    def _check_tables(self, plan: StepPlan) -> None:
        """What the device has been told of page tables is what the scheduler means."""
        if self.device._launched:
            return
        for seq in self.scheduler.running:
            assert seq.slot is not None
            assert self.device.slots[seq.slot].table == seq.pages, f"{plan.step=} {seq.seq_id=}"

    def _copies(self) -> list[Message]:
        """Ends of tier copies; some of those cancelled never ran."""
        done: list[Message] = [CopyDone(copy_id, tier) for copy_id, tier in self.copies_ended.items()]
        self.copies_ended = {}
        for copy_id in list(self.device.copies):
            if self.rng.random() < self.rates.copy:
                if copy_id in self.device.cancelled and self.rng.random() < 0.5:
                    del self.device.copies[copy_id]
                    done.append(CopyDone(copy_id, None))
                else:
                    done.append(CopyDone(copy_id, self.device.run_a_copy(copy_id)))
        return done

    def _random_messages(self) -> list[Message]:
        rng, rates, messages = self.rng, self.rates, []
        if self.num_submitted < rates.num_requests and rng.random() < rates.submit:
            messages += self._submit()
        live = list(self.scheduler.live)
        if live and rng.random() < rates.abort:
            messages.append(Abort((rng.choice(live), 10**6)))
        if live and rng.random() < rates.finish:
            messages.append(Finish(rng.choice(live)))
        if rng.random() < rates.control:
            messages.append(self._control())
        elif self.is_paused:
            self.is_paused = False
            messages.append(Resume())
        return messages

    def _control(self) -> Message:
        rng = self.rng
        match rng.randrange(10):
            case 0:
                self.is_paused = True
                return Pause(release=rng.random() < 0.5)
            case 1:
                recompute = rng.random() < 0.6
                return set_weights(self.versions, recompute, rng.choice((0, 1, 1, 2, 9)) if recompute else 0)
            case 2:
                return ResetCache()
            case 3 if rng.random() < 0.3:
                return Abort(None)
            case 4 if self.device.tiers:
                digest = rng.choice(list(self.device.tiers))
                gone = None if rng.random() < 0.7 else self.device.tiers[digest][0]
                del self.device.tiers[digest]
                return TierChange(((digest, gone),))
            case 5:
                return SetPromptShare(rng.choice((1, 2, 5, 1000)))
            case _:
                return SetDepth(rng.randint(0, self.config.max_depth))

    def _submit(self) -> list[Message]:
        rng, limit = self.rng, self.config.max_model_len
        room = min(limit, self.config.num_pages * self.config.page_size)
        prompt = self._prompt(min(room, limit - 1))
        num_prompt = len(prompt)
        max_tokens = rng.randint(1, room + 1 - num_prompt) if num_prompt < room else 1
        first = len(self.known)
        submit = Submit(
            seq_ids=tuple(range(first, first + rng.choice((1, 1, rng.randint(1, self.rates.max_n))))),
            prompt_ids=tuple(prompt),
            max_tokens=max_tokens if rng.random() < 0.9 or room < limit else 10**6,
            stop_ids=frozenset(rng.sample(range(VOCAB), rng.choice((0, 1, 2)))),
            min_tokens=rng.choice((0, 0, 3)),
            priority=rng.randrange(self.rates.priorities),
            salt=rng.choice((b"", b"", b"b")),
            needs_last_token=rng.random() < 0.2,
            max_depth=rng.choice((None, None, 0, 2)),
            computes_prompt=rng.random() < 0.1,
            keeps_pages=rng.random() < 0.3,
        )
        self.num_submitted += 1
        for seq_id in submit.seq_ids:
            answer = lone_run(submit, seq_id, limit)
            self.known[seq_id] = Known((submit.priority, seq_id), submit, answer, self.config.max_len(submit))
        keys = page_keys(submit.prompt_ids, self.config.page_size, cache_salt(identity(self.version), submit.salt))
        found = [(key.digest, self.device.tiers[key.digest][0]) for key in keys if key.digest in self.device.tiers]
        return [TierChange(tuple(found)), submit] if found and self.config.tiers else [submit]

    def _prompt(self, most: int) -> list[int]:
        """The start of a document or a conversation so far, and more."""
        rng = self.rng
        if self.known and rng.random() < 0.3:
            known = rng.choice(list(self.known.values()))
            said = [*known.submit.prompt_ids, *known.tokens]
            return (said + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))])[:most]
        num_prompt = rng.randint(1, most)
        document = rng.choice(self.documents)
        num_shared = rng.choice((0, num_prompt, rng.randint(0, num_prompt)))
        prompt = document[:num_shared] + [rng.randrange(VOCAB) for _ in range(num_prompt - min(num_shared, 40))]
        return prompt[:num_prompt]

    def _fill_tiers(self) -> None:
        """What an earlier run left on disk: pages of the documents, some of which are missing by now."""
        size = self.config.page_size
        if not self.config.tiers or self.rng.random() < 0.5:
            return
        for document in self.documents:
            values = hashes(document)
            for number, key in enumerate(page_keys(document, size, cache_salt(b"", b""))):
                if self.rng.random() < 0.9:
                    content = [((b"", False), value, 0) for value in values[number * size : (number + 1) * size]]
                    self.device.tiers[key.digest] = "disk", content
