"""A scheduler's inputs. Rank 0 decides at which step each takes effect; all ranks receive the same messages.

Ids are integers that are never used twice. A message for a sequence that has ended meanwhile is ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from glm5.engine.scheduler.plan import EndReason

Tier = Literal["host", "disk"]


@dataclass(frozen=True)
class Submit:
    """A request: `len(seq_ids)` sequences that continue one prompt, and share its pages.

    `max_tokens`: the most tokens of an answer. An answer ends with a token of `stop_ids` once it has `min_tokens`.
    `priority`: lower is served first. `salt`: prompts share pages only with those of the same salt.
    `needs_last_token`: the next step of a sequence cannot be launched before its last token is read (grammars).
    `max_depth`: the most tokens drafted a step, None for the scheduler's depth. `computes_prompt`: compute every
    prompt token, without the prefix cache (prompt logprobs, routed experts of the prompt). `keeps_pages`: the salt is a
    session's, whose pages stay when the weights change, up to an age (`SetWeights`); no other request shares them.
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
    keeps_pages: bool = False


@dataclass(frozen=True)
class Abort:
    """End these sequences in any state; None: all that were submitted before."""

    seq_ids: tuple[int, ...] | None


@dataclass(frozen=True)
class Finish:
    """End a sequence for a reason that the scheduler cannot see, such as a stop string."""

    seq_id: int
    reason: EndReason = "stop"


@dataclass(frozen=True)
class CopyDone:
    """A copy of a plan has ended. `tier`: where the page was loaded from or stored; None if the copy failed."""

    copy_id: int
    tier: Tier | None


@dataclass(frozen=True)
class TierChange:
    """New locations of pages: digest of the page's key, and its tier (None: in no tier any more).

    Sent before the `Submit` of a prompt whose pages were found, and after a tier has evicted pages. A late or wrong
    message costs a failed load, never a wrong token. `prompt_ids`: the prompt whose first pages these are, computed by
    the weights `identity`; empty if they are not of one prompt.
    """

    pages: tuple[tuple[bytes, Tier | None], ...]
    prompt_ids: Sequence[int] = ()
    identity: bytes = b""


@dataclass(frozen=True)
class SetDepth:
    """Set how many tokens are drafted for a decoding sequence."""

    depth: int


@dataclass(frozen=True)
class SetPromptShare:
    """Set the most prompt tokens in a step in which sequences decode."""

    max_tokens: int


@dataclass(frozen=True)
class Pause:
    """Plan nothing until `Resume`. `release`: preempt all sequences and empty the prefix tree, so that no page is in
    use; sequences are recomputed afterwards."""

    release: bool = False


@dataclass(frozen=True)
class Resume:
    """End a pause."""


@dataclass(frozen=True)
class SetWeights:
    """The model has the weights of `version` from this step on. Pages computed before are never shared again, but for
    those of sessions: they are, if all their keys are of the last `max_key_age` versions before.

    `identity`: a globally unique id of the weights, since stored pages outlive the process (`prefix.cache_salt`).
    `recompute`: running sequences are recomputed; otherwise they continue with the pages that they have.
    (To abort them instead, send `Abort(None)` first.)
    """

    version: int
    recompute: bool
    identity: bytes
    max_key_age: int = 0


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
