"""Newton-Schulz orthogonalisation: approximates the nearest semi-orthogonal matrix without a decomposition.

    X = U / |U|        repeat:  A = X X^T    X = a X + (b A + c A A) X        (on the smaller side)

Odd polynomials map singular values in (0, 1] towards 1. A fixed published triple gives about [0.7, 1.2]; sets that
change from step to step are more accurate (Muon; You; Amsel et al., Polar Express; DeepSeek).
"""

import torch
from torch import Tensor

from glm5.config.step import CoefficientSet

Triple = tuple[float, float, float]

_QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
COEFFICIENTS: dict[CoefficientSet, tuple[Triple, ...]] = {
    "quintic": (_QUINTIC,) * 5,
    "quintic-5": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar-express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    "two-phase": (_QUINTIC,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}
_EPS = 1e-7  # below it an update counts as zero
_PIECE = {"cpu": 1 << 20, "cuda": 1 << 28}  # elements worked on at a time


def orthogonalize(
    matrices: Tensor, coefficients: tuple[Triple, ...] = COEFFICIENTS["quintic"], dtype: torch.dtype | None = None
) -> Tensor:
    """Orthogonalise each matrix of [..., rows, cols], in the dtype of `matrices`; a zero matrix stays zero.

    Computed in `dtype`: by default bfloat16 on a GPU, as published, elsewhere float32 (float64 for float64). Large
    stacks are processed in parts.
    """
    stack = matrices.reshape(-1, *matrices.shape[-2:])
    if dtype is None:
        wide = torch.promote_types(stack.dtype, torch.float32)
        dtype = torch.bfloat16 if stack.is_cuda and stack.dtype != torch.float64 else wide
    step = max(1, _PIECE.get(stack.device.type, 1 << 24) // max(1, stack[0].numel())) if len(stack) else 1
    parts = [_orthogonalize(part, coefficients, dtype).to(matrices.dtype) for part in stack.split(step)]
    return torch.cat(parts).view(matrices.shape) if len(parts) > 1 else parts[0].view(matrices.shape)


def _orthogonalize(stack: Tensor, coefficients: tuple[Triple, ...], dtype: torch.dtype) -> Tensor:
    tall = stack.shape[-2] > stack.shape[-1]
    x = (stack.mT if tall else stack).to(torch.promote_types(dtype, torch.float32))
    # The norm is computed in float32: squares of small gradients underflow in bfloat16.
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(_EPS)).to(dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def flops(rows: int, cols: int, steps: int = 5) -> int:
    """Floating-point operations for one matrix: `steps` times 4 m^2 n + 2 m^3, m the smaller side."""
    m, n = sorted((rows, cols))
    return steps * (4 * m * m * n + 2 * m**3)
