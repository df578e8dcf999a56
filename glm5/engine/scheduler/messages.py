"""What a scheduler is told from outside. Rank 0 says at which step each takes effect; every rank is told the same.

Ids are integers that are never used twice. What names a sequence that has ended meanwhile is ignored: its end and the
message crossed on the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from glm5.engine.scheduler.plan import EndReason

Tier = Literal["host", "disk"]


@dataclass(frozen=True)
class Submit:
    """A request: `len(seq_ids)` sequences that continue one prompt, and share its pages.

    `max_tokens` is the most an answer may have. An answer ends with a token of `stop_ids` once it has `min_tokens`.
    `priority`: lower is served first. `salt`: prompts share pages only with those of the same salt.
    `needs_last_token`: the next step of a sequence cannot be launched before its last token is read (grammars).
    `max_depth`: the most tokens drafted a step, None for what the scheduler is set to. `computes_prompt`: every
    prompt token is to be computed, none taken from a cache (prompt logprobs, routed experts of the prompt).
    """

    seq_ids: tuple[int, ...]
    prompt_ids: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    priority: int = 0
    salt: bytes = b""
    needs_last_token: bool = False
    max_depth: int | None = None
    computes_prompt: bool = False


@dataclass(frozen=True)
class Abort:
    """End these sequences, in whatever state they are; None: all that were submitted before."""

    seq_ids: tuple[int, ...] | None


@dataclass(frozen=True)
class Finish:
    """End a sequence for a reason that only its client sees: a stop string."""

    seq_id: int
    reason: EndReason = "stop"


@dataclass(frozen=True)
class CopyDone:
    """A copy that a plan asked for has ended on every rank. `tier`: where the page was found or put, None if failed."""

    copy_id: int
    tier: Tier | None


@dataclass(frozen=True)
class TierChange:
    """Where pages can be loaded from now: digest of the page's key, and its tier (None: no longer anywhere).

    Comes before the `Submit` of a prompt for what its keys were found as, and after a tier dropped pages. Being late
    or wrong costs a failed load, never a wrong token.
    """

    pages: tuple[tuple[bytes, Tier | None], ...]


@dataclass(frozen=True)
class SetDepth:
    """How many tokens are drafted for a decoding sequence from now on."""

    depth: int


@dataclass(frozen=True)
class SetPromptShare:
    """How many tokens of prompts a step has, at most, in which sequences decode, from now on."""

    max_tokens: int


@dataclass(frozen=True)
class Pause:
    """Plan nothing until `Resume`. `release`: sequences give their pages back and the prefix tree is emptied, so that
    no page has a content that matters; sequences are computed anew afterwards."""

    release: bool = False


@dataclass(frozen=True)
class Resume:
    """End a pause."""


@dataclass(frozen=True)
class SetWeights:
    """The model's weights are those of `version` from this step on. Pages computed before are never shared again.

    `identity`: of the weights among all that ever were, for pages outlive the process (`prefix.cache_salt`).
    `recompute`: running sequences are computed anew; otherwise they go on with the pages that they have.
    (To abort them instead, send `Abort(None)` first.)
    """

    version: int
    recompute: bool
    identity: bytes


@dataclass(frozen=True)
class ResetCache:
    """Empty the prefix tree. Running sequences keep their pages."""


Message = (
    Submit
    | Abort
    | Finish
    | CopyDone
    | TierChange
    | SetDepth
    | SetPromptShare
    | Pause
    | Resume
    | SetWeights
    | ResetCache
)
