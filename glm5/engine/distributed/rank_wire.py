"""Orders of the first rank to the others, and their replies.

A rank executes orders in the order in which they arrive. `PlanStep`s carry scheduler messages and the step at which
they take effect: every rank plans for itself, and no plan is sent. Pickled: a pipe between processes of one program.
"""

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from glm5.engine.runner.runner import SeqSpec
from glm5.engine.scheduler.messages import Message
from glm5.engine.transport.wire import PushCall, Start

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Begin:
    """The first order to a rank. `port`: of the ranks' rendezvous."""

    start: Start
    rank: int
    size: int
    port: int


@dataclass(frozen=True)
class PlanStep:
    """Deliver messages, plan, launch. `specs`: of new sequences. `digest`: of all tokens that the first rank has read;
    a different one means that ranks compute different results. `is_masked`: wait for `Masks` before the launch. (The
    first rank makes them for its plan, and sends this order before it plans.)"""

    step: int
    messages: list[Message]
    specs: dict[int, SeqSpec]
    digest: int
    is_masked: bool


@dataclass(frozen=True)
class Masks:
    """Grammar bitmasks of the step planned last (`Runner.set_bitmasks`); None if it has no rows with a grammar."""

    masks: tuple[list[int], torch.Tensor] | None


@dataclass(frozen=True)
class Stage:
    """Read new weights while the old ones stay in use; answered."""

    call: int
    folder: Path


@dataclass(frozen=True)
class Swap:
    """Use the weights that were staged last."""

    version: int


@dataclass(frozen=True)
class PreparePush:
    """Compare what a push announces with the model; answered."""

    call: int
    push: PushCall


@dataclass(frozen=True)
class CheckBucket:
    """Receive a bucket of the push that was prepared last, and check its bytes; answered."""

    call: int
    number: int
    checksum: int


@dataclass(frozen=True)
class WriteBucket:
    """Write this rank's part of a bucket of the push that was prepared last; answered."""

    call: int
    number: int


@dataclass(frozen=True)
class EndPush:
    """All buckets are written, or the push has failed (None)."""

    version: int | None


@dataclass(frozen=True)
class Discard:
    """Discard the weights that were staged last, since another rank refused its shard."""


@dataclass(frozen=True)
class ReleaseWeights:
    """Answered with the bytes."""

    call: int
    level: int


@dataclass(frozen=True)
class RestoreWeights:
    """Answered."""

    call: int


@dataclass(frozen=True)
class ReleaseCache:
    """Answered with the bytes."""

    call: int


@dataclass(frozen=True)
class RestoreCache:
    """Answered."""

    call: int


@dataclass(frozen=True)
class WeightsChanged:
    """Not answered."""


@dataclass(frozen=True)
class End:
    """Exit with code 0."""


Order = (
    Begin
    | PlanStep
    | Masks
    | Stage
    | Swap
    | PreparePush
    | CheckBucket
    | WriteBucket
    | EndPush
    | Discard
    | ReleaseWeights
    | RestoreWeights
    | ReleaseCache
    | RestoreCache
    | WeightsChanged
    | End
)


class RankReply(msgspec.Struct, tag=True):
    """A rank's reply: a number, or the error. `kind`: name of the GlmError subclass."""

    call: int
    number: int = 0
    error: str | None = None
    kind: str = "GlmError"


def encoded(order: Order) -> bytes:
    """An order as bytes for a rank's pipe."""
    data = pickle.dumps(order, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def read_all(pipe: IO[bytes]) -> Iterator[Any]:
    """Orders as they arrive, until the pipe is closed."""
    while len(head := pipe.read(_LENGTH.size)) == _LENGTH.size:
        data = pipe.read(_LENGTH.unpack(head)[0])
        yield pickle.loads(data)


def digest_of(before: int, step: int, tokens: dict[int, list[int]]) -> int:
    """Digest of all tokens read up to a step. Hashes of integers are the same in every process."""
    return hash((before, step, *((seq_id, *new) for seq_id, new in sorted(tokens.items()))))
