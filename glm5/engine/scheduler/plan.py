"""What a scheduler decides: the step to launch, and what became of sequences.

How a runner must read a plan, in this order:

1. Slots. `entered` sequences take their slot: write token ids, length and page table row (the rest of the row
   points at a dump page), then `table`, single entries of rows that changed.
2. `page_copies`, in order, before anything of this step is computed.
3. `loads` and `stores` may run beside the steps. A load waits for all that is launched so far, its own step's page
   copies included (the page may just have been another's). A store waits for what was launched before its step: the
   step that filled its page may still be in the draft layer. Each is answered by one `CopyDone`, also when `cancelled`.
4. `items`. Rows of a prompt chunk are `start .. start + num_rows - 1` exactly. Rows of a decoding sequence begin at its
   true length - 1, which the device alone knows; `start` is the furthest that this can be. What falls on positions
   that the row of the page table does not cover goes to the dump page: its tokens will be discarded.
5. A step writes no row before its first. After it, rows before the new true length - 1 are final in all layers, the
   MTP layer included: a page that they fill may be shared and copied as soon as the step's tokens have been applied,
   by what is launched then (tokens are read before the MTP layer is done with a prompt).
   (So the MTP row of the last token of a shared page was computed with whatever token followed it first, and steps of
   decoding sequences that draft nothing leave their MTP rows as they are: that touches drafts, never answers.) What is
   drafted ahead for the next step may be written up to 2 * depth - 1 rows further than `start`; pages for that are
   reserved if there are any to spare.

All launches happen in the order of the plans, so a page that one plan frees can be written by the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from glm5.engine.tiers.key import PageKey

Kind = Literal["prefill", "decode"]
EndReason = Literal["stop", "length", "abort", "error"]
Wait = Literal["pause", "results", "copies", "requests"]


class Item(NamedTuple):
    """Rows of one sequence. `samples`: its tokens are wanted, 1 of a prompt, 1 to 1 + `depth` while decoding."""

    seq_id: int
    slot: int
    start: int
    num_rows: int
    depth: int
    kind: Kind
    samples: bool


class Entered(NamedTuple):
    """A sequence that took a slot: its known tokens, its pages, and how many tokens the pages hold already.

    `hit_device`, `hit_lower`: tokens found in the prefix tree and in lower tiers; their sum is where the prompt
    missed first. `donor_slot`: the sequence shares the prompt of the one in that slot.
    """

    seq_id: int
    slot: int
    token_ids: list[int]
    pages: tuple[int, ...]
    hit_device: int
    hit_lower: int
    donor_slot: int | None


class TableEntry(NamedTuple):
    """Entry `column` of the page table row of `slot` is `page` from now on."""

    slot: int
    column: int
    page: int


class PageCopy(NamedTuple):
    """Copy a whole page on the device, all layers."""

    source: int
    target: int


class TierCopy(NamedTuple):
    """Move a page between the device and the tiers behind it, under `key`."""

    copy_id: int
    key: "PageKey"
    page: int


class Output(NamedTuple):
    """What a sequence gained. `token_ids` end with the stop token if one ended it. `reason`: why it is over."""

    seq_id: int
    token_ids: Sequence[int]
    reason: EndReason | None


class Bucket(NamedTuple):
    """Static shape of a step. Decoding only: `num_seqs` rows of 1 + `depth` queries. Else `num_tokens` packed ones."""

    num_seqs: int
    depth: int
    num_tokens: int
    decodes_only: bool


@dataclass(slots=True)
class StepPlan:
    """One step. With no `items` nothing is to be launched and no `apply` follows; `wait` says what to wait for.

    `ended`: sequences that messages ended in this plan. `left`: slots given up since the last plan, some of which
    `entered` may use again. `depth`: the largest of all items; `draft_depth`: how many tokens to draft for the next
    step. `version`: of the weights that compute the step.
    """

    step: int
    version: int
    items: list[Item] = field(default_factory=list)
    num_tokens: int = 0
    depth: int = 0
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
    ended: list[Output] = field(default_factory=list)
    wait: Wait | None = None
