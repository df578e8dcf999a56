"""Measured bandwidth of device memory and FLOP/s of the matrix units of this GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.bench.kernels.case import Case
from glm5.bench.kernels.clock import milliseconds


@dataclass(frozen=True)
class Machine:
    """Ceilings: bytes a second (read plus written, of a copy) and operations a second of square products."""

    name: str
    bytes_per_s: float
    flops_per_s: dict[str, float]

    def floor(self, case: Case) -> float:
        """Roofline time of `case` in microseconds."""
        return 1e6 * max(case.num_bytes / self.bytes_per_s, case.num_flops / self.flops_per_s[case.unit])


def measured() -> Machine:
    """The current CUDA device; takes about a second."""
    source = torch.randint(0, 127, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16 = _seconds(lambda: a @ b)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    fp8 = _seconds(lambda: _scaled_mm(a8, b8, one))
    flops = 2 * 8192**3
    return Machine(torch.cuda.get_device_name(), 2 * source.numel() / copy, {"bf16": flops / bf16, "fp8": flops / fp8})


def _scaled_mm(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    tensorwise = F.ScalingType.TensorWise
    return F.scaled_mm(a, b.T, scale, tensorwise, scale, tensorwise, output_dtype=torch.bfloat16, use_fast_accum=True)


def _seconds(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    return sorted(milliseconds(run) for _ in range(7))[3] / 1e3
