"""A scheduler's output: the step to launch, and the results of sequences.

How a runner must execute a plan, in this order:

1. Slots. `entered` sequences take their slot: write token ids, length and page table row (the rest of the row
   points at the dump page), then `table`, single changed entries.
2. `page_copies`, in order, before anything of this step is computed.
3. `loads` and `stores` may overlap with steps. A load waits for everything launched so far, including its own step's
   page copies (the page may have just been freed by another sequence). A store waits for the launches before its step:
   the draft layer may still be filling the page. Each gets one `CopyDone`, also when `cancelled`.
4. `items`. Rows of a prompt chunk are `start .. start + num_rows - 1` exactly. Rows of a decoding sequence begin at its
   true length - 1, which only the device knows; `max_end` is an upper bound of every row's position + 1. Rows at
   positions that the page table row does not cover are written to the dump page: their tokens will be discarded.
5. A step writes no row before its first. After it, rows before the new true length - 1 are final in all layers,
   including the MTP layer. A page that they fill may be shared and copied by launches after the step's tokens have
   been applied (tokens are read before the MTP layer has finished a prompt).
   (So the MTP row of a shared page's last token was computed with the token that first followed it, and steps without
   drafts do not update MTP rows. This affects drafts, never answers.) Drafts for the next step may be written up to
   2 * depth - 1 rows beyond the first; pages for them are reserved if enough are available.

All launches happen in the order of the plans, so the next plan may write a page that one plan frees.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from glm5.engine.tiers.key import PageKey

Kind = Literal["prefill", "decode"]
EndReason = Literal["stop", "length", "abort", "error"]
Wait = Literal["pause", "results", "copies", "requests"]


class Item(NamedTuple):
    """Rows of one sequence, from position `start` on (-1: from its last known token on, while it decodes).

    `samples`: it samples tokens, 1 after a prompt, 1 to 1 + `depth` while decoding. Equal rows of a decoding sequence
    are the same object in one plan after the other.
    """

    seq_id: int
    slot: int
    start: int
    num_rows: int
    depth: int
    kind: Kind
    samples: bool


class Entered(NamedTuple):
    """A sequence admitted to a slot: its known tokens, its pages, and its cache hits.

    `hit_device`, `hit_lower`: tokens found in the prefix tree and then in lower tiers. `donor_slot`: the sequence
    shares the prompt of the one in that slot.
    """

    seq_id: int
    slot: int
    token_ids: list[int]
    pages: tuple[int, ...]
    hit_device: int
    hit_lower: int
    donor_slot: int | None


class TableEntry(NamedTuple):
    """Set entry `column` of the page table row of `slot` to `page`."""

    slot: int
    column: int
    page: int


class PageCopy(NamedTuple):
    """Copy a page on the device, in all layers."""

    source: int
    target: int


class TierCopy(NamedTuple):
    """Copy a page between the device and the lower tiers, under `key`."""

    copy_id: int
    key: "PageKey"
    page: int


class Output(NamedTuple):
    """New tokens of a sequence. They end with the stop token if one ended it. `reason`: why it ended, or None."""

    seq_id: int
    token_ids: Sequence[int]
    reason: EndReason | None


@dataclass(slots=True)
class Outputs:
    """The new tokens of a step: of sequences that go on as columns, `counts[i]` of `token_ids` for `seq_ids[i]`, and
    those of sequences that ended. Both in the order of the plan."""

    seq_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended: list[Output] = field(default_factory=list)

    def add(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Add tokens of a sequence that goes on."""
        self.seq_ids.append(seq_id)
        self.token_ids += token_ids
        self.counts.append(len(token_ids))

    def running(self) -> Iterator[Output]:
        """The columns, a sequence at a time."""
        end = 0
        for seq_id, count in zip(self.seq_ids, self.counts, strict=True):
            end += count
            yield Output(seq_id, self.token_ids[end - count : end], None)


class Bucket(NamedTuple):
    """Static shape of a step. Decoding only: `num_seqs` times 1 + `depth` rows. Otherwise `num_tokens` packed rows."""

    num_seqs: int
    depth: int
    num_tokens: int
    decodes_only: bool


@dataclass(slots=True)
class StepPlan:
    """One step. Without `items` nothing is launched and no `apply` follows; `wait` is what the scheduler waits for.

    `ended`: sequences that messages ended in this plan. `left`: slots freed since the last plan, which `entered` may
    reuse. `depth`: the largest of all items; `max_end`: every row is before this position. `draft_depth`: how many
    tokens to draft for the next step. `version`: of the weights that compute the step. `key_versions`: of sequences
    that go on from keys of other weights, or no longer do; see `Sequence`.
    """

    step: int
    version: int
    items: list[Item] = field(default_factory=list)
    num_tokens: int = 0
    depth: int = 0
    max_end: int = 0
    draft_depth: int = 0
    bucket: Bucket | None = None
    entered: list[Entered] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    table: list[TableEntry] = field(default_factory=list)
    page_copies: list[PageCopy] = field(default_factory=list)
    loads: list[TierCopy] = field(default_factory=list)
    stores: list[TierCopy] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    key_versions: dict[int, list[int]] = field(default_factory=dict)
    ended: list[Output] = field(default_factory=list)
    wait: Wait | None = None
