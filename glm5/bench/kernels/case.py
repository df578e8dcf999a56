"""One measurement: an op at a shape, its minimum bytes and operations, its check and its launch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Launch = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """`op` at `shape`, computed by `variant`.

    `make(i)` prepares launch i with the same shapes in other memory, so that successive launches miss the L2 cache.
    `error()` is the relative RMS error against float64 on separate inputs; a case is timed if it is below `budget`.
    """

    op: str
    shape: str
    make: Callable[[int], Launch]
    error: Callable[[], float]
    budget: float
    num_bytes: int
    """Minimum traffic: each input read once, each output written once."""
    num_flops: int = 0
    unit: Literal["fp8", "bf16"] = "fp8"
    """The matrix units whose rate bounds the operations."""
    variant: str = ""

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.op, self.shape, self.variant) if part)


@dataclass(frozen=True)
class Row:
    """Microseconds of a case's launch (median, 20th and 80th percentile of replays), or the reason of its failure."""

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
        """Achieved share of the roofline."""
        return self.floor / self.micros
