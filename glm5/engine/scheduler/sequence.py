"""One sequence as the scheduler sees it: its progress, certain and at most, and its pages.

A sequence waits (no pages, no slot), runs (both), or has ended.

    tokens      prompt and answer as far as they were read
    confirmed   positions whose keys are certainly in pages; full pages of them may be shared
    computed    how many of the `goal` known tokens are planned; once all are, the sequence decodes
    min_len, max_len   bounds of its length once all planned steps are read: a step adds 1 to 1 + depth tokens
    covered     positions that its pages have room for

Keys are computed for every token but the last: n tokens have n - 1 positions in the cache, and a sequence of at most
`cap` tokens needs cap - 1.
"""

from collections import deque
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from glm5.engine.cache.prefix import Node
from glm5.engine.scheduler.messages import Submit, Tier
from glm5.engine.scheduler.plan import EndReason, Item
from glm5.engine.tiers.key import PageKey

Rank = tuple[int, int]


@dataclass(eq=False)
class Group:
    """The live sequences of one request. `held`: those that wait for another to compute the prompt."""

    members: list["Sequence"] = field(default_factory=list)
    held: list["Sequence"] = field(default_factory=list)


@dataclass(eq=False)
class Restore:
    """Pages that a sequence waits for. `pending`: number, key and page of loads that have not begun. `num_good`: how
    many leading pages will be valid if no further load fails. The first `num_held` were in the prefix tree, the others
    come from these `tiers`. `is_again`: the sequence was admitted before, and was preempted."""

    pending: deque[tuple[int, PageKey, int]]
    num_good: int
    num_held: int
    tiers: list[Tier]
    is_again: bool
    num_in_flight: int = 0
    copy_ids: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return not self.pending and not self.num_in_flight


class Sequence:
    """State of a sequence; equal only to itself. The scheduler and `PageManager` write it."""

    __slots__ = (
        "cap",
        "computed",
        "confirmed",
        "covered",
        "decodes",
        "goal",
        "group",
        "in_flight",
        "is_pure",
        "item",
        "key_versions",
        "max_depth",
        "max_len",
        "min_len",
        "needs_last_token",
        "node",
        "num_in_tree",
        "num_prompt",
        "pages",
        "path",
        "rank",
        "restore",
        "salt",
        "seq_id",
        "slot",
        "stop_ids",
        "submit",
        "tokens",
        "was_admitted",
    )

    def __init__(self, seq_id: int, rank: Rank, submit: Submit, cap: int, max_depth: int, group: Group):
        self.seq_id, self.rank, self.submit, self.cap, self.group = seq_id, rank, submit, cap, group
        self.max_depth = max_depth if submit.max_depth is None else min(max_depth, submit.max_depth)
        self.needs_last_token, self.stop_ids = submit.needs_last_token, submit.stop_ids
        self.tokens: list[int] = list(submit.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.slot: int | None = None
        self.pages: list[int] = []
        self.covered = self.computed = self.confirmed = 0
        self.goal = self.min_len = self.max_len = len(self.tokens)
        # All tokens known at admission are planned.
        self.decodes = False
        # Unread steps with this sequence.
        self.in_flight = 0
        # Its rows in the last step in which it decoded.
        self.item: Item | None = None
        self.restore: Restore | None = None
        # Its position in the prefix tree, and the last match while it waits.
        self.node: Node | None = None
        self.num_in_tree = 0
        self.path: list[Node] = []
        self.salt = b""
        # Of the weights that computed the keys of its first positions; those of all others are of the current weights.
        self.key_versions: list[int] = []
        # Its pages may be shared: all are of the current weights, or of others that its session may use.
        self.is_pure = True
        self.was_admitted = False

    @property
    def is_fresh(self) -> bool:
        """Whether it has no answer token yet, so that it needs only the prompt's pages."""
        return len(self.tokens) == self.num_prompt

    def is_full(self, limit: int) -> bool:
        """Whether its prompt can be computed in one chunk of at most `limit` tokens."""
        return self.restore is None and not self.computed and self.goal <= limit

    @property
    def donor(self) -> "Sequence | None":
        """A sequence of the same request whose pages will contain the full prompt once earlier plans have run.

        (This plan's last chunks are planned after its admissions.)
        """
        if not self.is_fresh:
            return None
        return next((other for other in self.group.members if other.decodes and other.is_pure), None)

    @property
    def must_be_held(self) -> bool:
        """Whether another sequence of the request is computing the prompt, so that this one should wait for it."""
        if not self.is_fresh or self.donor is not None:
            return False
        return any(other.slot is not None and not other.decodes for other in self.group.members)

    def commit(self, token_ids: Ids[int]) -> tuple[Ids[int], EndReason | None]:
        """Append sampled tokens, up to the one that ends the answer. Returns the appended ones, and the end reason."""
        tokens, reason = self.tokens, None
        room = self.cap - len(tokens)
        if len(token_ids) >= room:
            token_ids, reason = token_ids[:room], "length"
        if not self.stop_ids.isdisjoint(token_ids):
            first = self.num_prompt + self.submit.min_tokens - len(tokens)
            for number, token_id in enumerate(token_ids, start=1):
                if number >= first and token_id in self.stop_ids:
                    token_ids, reason = token_ids[:number], "stop"
                    break
        tokens.extend(token_ids)
        return token_ids, reason


@dataclass(slots=True)
class InFlight:
    """A launched step: decoding sequences with the most tokens that each samples, then the chunks of prompts, each with
    whether it samples and its end."""

    step: int
    decoding: list[Sequence] = field(default_factory=list)
    gains: list[int] = field(default_factory=list)
    chunks: list[tuple[Sequence, bool, int]] = field(default_factory=list)

    @property
    def max_depth(self) -> int:
        """The most drafts that one of its sequences may have."""
        return max([seq.max_depth for seq in (*self.decoding, *(seq for seq, *_ in self.chunks))])
