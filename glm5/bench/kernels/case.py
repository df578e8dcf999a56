"""One measurement: an op at a shape, the bytes and operations it cannot do without, its check and its launch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Launch = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """`op` at `shape`, as `variant` computes it.

    `make(i)` prepares launch i: same shapes, other memory, so that a row of them finds nothing in the cache.
    `error()` is the relative RMS error against float64 on inputs of its own; a case is timed if it is below `budget`.
    """

    op: str
    shape: str
    make: Callable[[int], Launch]
    error: Callable[[], float]
    budget: float
    num_bytes: int
    """Read and written at least: each input once, each output once."""
    num_flops: int = 0
    unit: Literal["fp8", "bf16"] = "fp8"
    """Whose rate bounds the operations."""
    variant: str = ""

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.op, self.shape, self.variant) if part)


@dataclass(frozen=True)
class Row:
    """A case that was measured: microseconds of a launch (median, 20th and 80th percentile of replays), or why not."""

    case: Case
    error: float
    micros: float = float("nan")
    p20: float = float("nan")
    p80: float = float("nan")
    floor: float = float("nan")
    failure: str = ""

    @property
    def terabytes_per_s(self) -> float:
        return self.case.num_bytes / self.micros / 1e6

    @property
    def teraflops(self) -> float:
        return self.case.num_flops / self.micros / 1e6

    @property
    def of_floor(self) -> float:
        """Share of the ceiling that was reached."""
        return self.floor / self.micros
