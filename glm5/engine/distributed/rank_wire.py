"""What the first rank of an engine tells the others, and what they say back.

A rank does what it is told in order. `Turn`s carry what schedulers hear, stamped with the step it takes effect at:
every rank plans for itself, and no plan is ever sent. Pickled: both ends are one program, on one machine, in one pipe.
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
from glm5.engine.transport.wire import Start

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Begin:
    """The first words to a rank. `port`: where ranks meet."""

    start: Start
    rank: int
    size: int
    port: int


@dataclass(frozen=True)
class Turn:
    """Deliver, plan, launch. `specs`: of sequences that are new. `digest`: of the tokens that the first rank has read
    so far; another one means that ranks do not compute the same. `is_masked`: `Masks` follow, which the launch waits
    for: they are made for a plan, and this is told before the first rank has one."""

    step: int
    messages: list[Message]
    specs: dict[int, SeqSpec]
    digest: int
    is_masked: bool


@dataclass(frozen=True)
class Masks:
    """What grammars leave for the step of the last turn (`Runner.permit`); None if it has no rows of theirs."""

    masks: tuple[list[int], torch.Tensor] | None


@dataclass(frozen=True)
class Stage:
    """Read new weights beside the old ones; answered."""

    call: int
    folder: Path


@dataclass(frozen=True)
class Swap:
    """Take the weights that were staged last."""

    version: int


@dataclass(frozen=True)
class Discard:
    """Forget the weights that were staged last, as another rank refused its part of them."""


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
    """Leave in order."""


Order = (
    Begin
    | Turn
    | Masks
    | Stage
    | Swap
    | Discard
    | ReleaseWeights
    | RestoreWeights
    | ReleaseCache
    | RestoreCache
    | WeightsChanged
    | End
)


class RankReply(msgspec.Struct, tag=True):
    """A rank's answer: a number, or why not. `kind`: name of the GlmError subclass."""

    call: int
    number: int = 0
    error: str | None = None
    kind: str = "GlmError"


def encoded(order: Order) -> bytes:
    """An order as it goes into a rank's pipe."""
    data = pickle.dumps(order, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def read_all(pipe: IO[bytes]) -> Iterator[Any]:
    """Orders as they come, up to the end of the pipe."""
    while len(head := pipe.read(_LENGTH.size)) == _LENGTH.size:
        data = pipe.read(_LENGTH.unpack(head)[0])
        yield pickle.loads(data)


def digest_of(before: int, step: int, tokens: dict[int, list[int]]) -> int:
    """Of everything read up to a step. Hashes of integers are the same in every process."""
    return hash((before, step, *((seq_id, *new) for seq_id, new in sorted(tokens.items()))))
