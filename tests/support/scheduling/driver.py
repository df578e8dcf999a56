"""A scheduler driven by hand: plan, apply, and tokens that say what they are."""

from collections.abc import Mapping

from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import CopyDone, Message, Submit
from glm5.engine.scheduler.plan import Output, StepPlan
from glm5.engine.scheduler.scheduler import Scheduler
from tests.support.scheduling.plans import in_order

TOKEN = 1000


def config(**options) -> SchedulerConfig:
    """Plenty of everything, pages of 4 tokens; no launch-ahead."""
    defaults = {
        "page_size": 4,
        "num_pages": 100,
        "max_num_seqs": 8,
        "max_tokens_per_step": 64,
        "max_model_len": 200,
        "launch_ahead": False,
        "headroom": 0.0,
    }
    return SchedulerConfig(**defaults | options)


def prompt(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + num_tokens))


def submit(seq_ids: int | tuple[int, ...], num_prompt: int, max_tokens: int = 8, **options) -> Submit:
    """A request whose prompt has no page in common with one of other ids, unless `prompt_ids` says so."""
    ids = (seq_ids,) if isinstance(seq_ids, int) else seq_ids
    return Submit(ids, options.pop("prompt_ids", prompt(num_prompt, 300 * (1 + ids[0]))), max_tokens, **options)


class Driver:
    """`outputs`: all that came out. Every sampled token is TOKEN; as many are accepted as `accepts` says."""

    def __init__(self, **options):
        self.scheduler = Scheduler(config(**options))
        self.unread: list[StepPlan] = []
        self.outputs: list[Output] = []
        self.accepts = 1

    def tell(self, *messages: Message) -> None:
        self.scheduler.deliver(self.scheduler.next_step, messages)

    def plan(self, *messages: Message) -> StepPlan:
        """Plan a step, leave it unread."""
        self.tell(*messages)
        plan = self.scheduler.plan(self.scheduler.next_step)
        if plan.items:
            self.unread.append(plan)
        return plan

    def read(self, tokens: Mapping[int, list[int]] | None = None) -> list[Output]:
        """Apply the oldest unread step; `tokens` of some sequences."""
        plan = self.unread.pop(0)
        results = {i.seq_id: [TOKEN] * min(self.accepts, 1 + i.depth) for i in plan.items if i.samples}
        outputs = in_order(plan, self.scheduler.apply(plan.step, results | dict(tokens or {})))
        self.outputs += outputs
        return outputs

    def step(self, *messages: Message) -> StepPlan:
        """Plan a step and read it."""
        plan = self.plan(*messages)
        if plan.items:
            self.read()
        return plan

    def end_copies(self, plan: StepPlan, tier="host") -> None:
        """All copies of the plan have ended."""
        self.tell(*(CopyDone(copy.copy_id, tier) for copy in [*plan.loads, *plan.stores]))

    def run(self) -> list[StepPlan]:
        """Until nothing is left to do; copies end at once."""
        plans = []
        while self.scheduler.has_work:
            plans.append(self.plan())
            self.end_copies(plans[-1])
            num_ahead = 1 if self.scheduler.config.launch_ahead and plans[-1].items else 0
            while len(self.unread) > num_ahead:
                self.read()
        return plans


def rows(plan: StepPlan) -> dict[int, int]:
    """Tokens of each sequence in a plan."""
    return {item.seq_id: item.num_rows for item in plan.items}
