"""What every plan must keep to, whatever was asked. Checked right after it was made, against what was known before."""

from dataclasses import dataclass, field

from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import Submit
from glm5.engine.scheduler.plan import Item, Output, Outputs, StepPlan
from glm5.engine.scheduler.scheduler import Scheduler
from glm5.engine.scheduler.sequence import Rank, Sequence


@dataclass
class Known:
    """What the world knows of a sequence. `unread`: its items in steps that are not read."""

    rank: Rank
    submit: Submit
    answer: list[int]
    cap: int
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    unread: list[Item] = field(default_factory=list)


def in_order(plan: StepPlan, outputs: Outputs) -> list[Output]:
    """The outputs of a step in the order of its items."""
    by_id = {output.seq_id: output for output in [*outputs.running(), *outputs.ended]}
    assert len(by_id) == len(outputs.seq_ids) + len(outputs.ended), "a sequence has two outputs"
    return [by_id[item.seq_id] for item in plan.items if item.seq_id in by_id]


@dataclass
class Before:
    """The scheduler's state before a plan was made."""

    running: dict[int, Rank]

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Before":
        return cls({seq.seq_id: seq.rank for seq in scheduler.running})


def check_plan(
    config: SchedulerConfig, scheduler: Scheduler, plan: StepPlan, before: Before, known: dict[int, Known]
) -> None:
    check_sizes(config, scheduler, plan)
    check_half_budget(config, scheduler, plan)
    check_order(scheduler, plan, before, known)
    check_bounds(scheduler, plan, known)
    check_ownership(scheduler, plan)


def is_whole(config: SchedulerConfig, plan: StepPlan) -> bool:
    """A step of whole prompts alone."""
    return all(
        item.kind == "prefill" and item.samples and not item.start and item.num_rows <= config.full_prompt
        for item in plan.items
    )


def check_sizes(config: SchedulerConfig, scheduler: Scheduler, plan: StepPlan) -> None:
    assert plan.num_tokens == sum(item.num_rows for item in plan.items)
    assert plan.num_tokens <= config.max_tokens_per_step, f"{plan.num_tokens=} is over the budget"
    assert len({item.slot for item in plan.items}) == len(plan.items), "a slot is used twice"
    assert len({item.seq_id for item in plan.items}) == len(plan.items), "a sequence is planned twice"
    assert len(scheduler.running) <= config.max_num_seqs
    assert plan.depth == max((item.depth for item in plan.items), default=0)
    assert (plan.bucket is None) == (not plan.items)
    if plan.bucket is not None:
        assert plan.bucket.num_seqs >= len(plan.items)
        assert plan.bucket.num_tokens >= plan.num_tokens
        assert plan.bucket.depth == plan.depth
        assert plan.bucket.decodes_only == all(item.kind == "decode" for item in plan.items)
    for item in plan.items:
        seq = scheduler.live[item.seq_id]
        assert item.num_rows >= 1
        assert item.slot == seq.slot
        chunk = config.max_prompt_chunk
        assert item.kind == "decode" or chunk is None or item.num_rows <= chunk


def check_half_budget(config: SchedulerConfig, scheduler: Scheduler, plan: StepPlan) -> None:
    beside = any(item.kind == "decode" for item in plan.items)
    most = config.prompt_budget(scheduler.max_prompt_tokens if beside else None)
    prompts = sum(item.num_rows for item in plan.items if item.kind == "prefill")
    assert prompts <= most, f"{prompts} tokens of prompts beside those that decode, who bear {most}"
    half = max(1, most // 2)
    if is_whole(config, plan):
        return
    for item in plan.items:
        if item.kind == "prefill" and item.num_rows > half:
            others = [seq for seq in scheduler.prompting if seq.restore is None and seq.seq_id != item.seq_id]
            waiting = [seq.seq_id for seq in others + scheduler.waiting]
            assert not waiting, f"{item} takes more than {half} tokens while {waiting} wait"


def check_order(scheduler: Scheduler, plan: StepPlan, before: Before, known: dict[int, Known]) -> None:
    decodes = [known[item.seq_id].rank for item in plan.items if item.kind == "decode"]
    prompts = [known[item.seq_id].rank for item in plan.items if item.kind == "prefill"]
    kinds = [item.kind for item in plan.items]
    assert kinds == sorted(kinds), "a prompt comes before a decoding sequence"
    assert decodes == sorted(decodes), "decoding sequences are out of order"
    entered = {entry.seq_id for entry in plan.entered}
    continued = [known[i.seq_id].rank for i in plan.items if i.kind == "prefill" and i.seq_id not in entered]
    assert continued == sorted(continued), "prompts are out of order"
    assert prompts[: len(continued)] == continued, "a new prompt comes before one under way"
    unserved = [
        seq.rank
        for seq in scheduler.prompting
        if seq.restore is None and seq.seq_id not in {item.seq_id for item in plan.items}
        if seq.computed or seq.goal > scheduler.config.full_prompt  # those may have the next step for themselves
    ]
    unserved = [] if is_whole(scheduler.config, plan) else unserved  # they have the next one
    assert scheduler.is_paused or all(rank > max(continued, default=(-99, 0)) for rank in unserved), "overtaken"
    admitted = [known[seq_id].rank for seq_id in entered]
    waiting = [seq.rank for seq in scheduler.waiting]
    assert max(admitted, default=(-99, 0)) < min(waiting, default=(99, 0)), "a sequence overtook one that waits"
    _check_held(scheduler, plan)
    preempted = [known[seq_id].rank for seq_id in plan.preempted]
    stayed = [
        rank for seq_id, rank in before.running.items() if seq_id in _running(scheduler) and seq_id not in entered
    ]
    assert min(preempted, default=(99, 0)) > max(stayed, default=(-99, 0)), "not the youngest was preempted"


def _check_held(scheduler: Scheduler, plan: StepPlan) -> None:
    """A sequence is held back only while another computes their prompt."""
    planned = {item.seq_id for item in plan.items if item.kind == "prefill"}
    for seq in scheduler.live.values():
        if seq in seq.group.held:
            others = [other for other in seq.group.members if other.slot is not None]
            assert any(not other.decodes or other.seq_id in planned for other in others), f"{seq.seq_id} is forgotten"
    for entry in plan.entered:
        seq = scheduler.live[entry.seq_id]
        if seq.submit.computes_prompt and seq.is_fresh and entry.donor_slot is None:
            assert entry.hit_device == entry.hit_lower == 0, f"{entry} does not compute its prompt"


def check_bounds(scheduler: Scheduler, plan: StepPlan, known: dict[int, Known]) -> None:
    ends = [0]
    for item in plan.items:
        state = known[item.seq_id]
        certain = len(state.submit.prompt_ids) + len(state.tokens) + sum(i.samples for i in state.unread)
        assert item.kind == "prefill" or certain < state.cap, f"{item} is certain to have ended"
        most = sum(earlier.samples * (1 + earlier.depth) for earlier in state.unread)
        length = len(state.submit.prompt_ids) + len(state.tokens) + most
        ends.append(item.num_rows + (item.start if item.kind == "prefill" else length - 1))
        sampled = any(earlier.samples for earlier in state.unread)
        assert not (state.submit.needs_last_token and sampled), f"{item} needs a token that is not read"
        limit = scheduler.depth if state.submit.max_depth is None else min(scheduler.depth, state.submit.max_depth)
        assert item.depth <= limit, f"{item} drafts more than {limit}"
        assert certain + item.depth < state.cap, f"{item} drafts beyond the end"
    assert plan.max_end == max(ends), f"{plan.max_end=}, but rows may end at {max(ends)}"


def check_ownership(scheduler: Scheduler, plan: StepPlan) -> None:
    """Rows are written to pages that nobody else can read."""
    pool, size = scheduler.page_manager.pool, scheduler.config.page_size
    for item in plan.items:
        seq = scheduler.live[item.seq_id]
        first = item.start if item.kind == "prefill" else len(seq.tokens) - 1
        end = first + item.num_rows if item.kind == "prefill" else seq.max_len - 1
        for page in seq.pages[first // size : -(-end // size)]:
            assert pool.refs[page] == 1, f"{item} writes {page=}, which others hold"
            assert not pool.is_kept(page), f"{item} writes {page=}, which is shared"
    for copy in plan.page_copies:
        assert pool.refs[copy.target] == 1


def _running(scheduler: Scheduler) -> dict[int, Sequence]:
    return {seq.seq_id: seq for seq in scheduler.running}
