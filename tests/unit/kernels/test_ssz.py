"""ssz: the definition number by number; native code and Triton's: the same error, all but the same codes."""

import pytest
import torch
from torch import Tensor

from glm5.kernels.ssz import ssz
from tests.support.interpreter import interpreted
from tests.support.weights import laplace

OPTS = {"quant_min": -8.0, "quant_max": 7.0, "starts": (1.0, 0.8, 0.6, 0.45, 0.3), "steps": 2, "refine": 3}
# (B, O, G, I): one row, many groups, a ragged last program, widths that are no power of two.
SHAPES = [(1, 1, 1, 5), (2, 3, 4, 32), (3, 5, 1, 300), (1, 67, 2, 128)]
SAME_CODES = 0.9999
SAME_ERROR = 1e-6  # relative; measured 1e-7


def codes(w: Tensor, scale: Tensor) -> Tensor:
    return (w / scale[..., None]).round().clamp(-8, 7)


def error(w: Tensor, h: Tensor | None, scale: Tensor) -> Tensor:
    wrong = (w - codes(w, scale) * scale[..., None]).double().square()
    return (wrong if h is None else wrong * h[:, None]).sum(-1)


def make(shape, weighted: bool, gen) -> tuple[Tensor, Tensor | None]:
    w = laplace(gen, *shape)
    w[0, 0, 0] = 0
    return w, torch.rand(shape[0], *shape[2:], generator=gen) if weighted else None


def by_numbers(w: list[float], h: list[float]) -> float:
    scale = first = max(map(abs, w)) / 7 or 1.0
    best, most = first, 0.0

    def step(scale: float) -> tuple[float, float]:
        q = [min(7, max(-8, round(v / scale))) for v in w]
        hwq = sum(a * b * c for a, b, c in zip(h, w, q, strict=True))
        scale = hwq / max(sum(a * c * c for a, c in zip(h, q, strict=True)), 1e-30)
        return scale if scale > 0 else 1.0, scale * hwq

    for start in OPTS["starts"]:
        scale = first * start
        for _ in range(2):
            scale, explained = step(scale)
            best, most = (scale, explained) if explained > most else (best, most)
    for _ in range(3):
        scale, explained = step(best)
        best, most = (scale, explained) if explained > most else (best, most)
    return best


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_by_the_formula(shape, weighted, gen):
    w, h = make(shape, weighted, gen)
    w, h = w.double(), None if h is None else h.double()
    got = ssz(w, h, **OPTS, impl="reference")
    for b in range(shape[0]):
        for o in range(min(3, shape[1])):
            for g in range(shape[2]):
                of_h = [1.0] * shape[3] if h is None else h[b, g].tolist()
                assert got[b, o, g].item() == pytest.approx(by_numbers(w[b, o, g].tolist(), of_h), rel=1e-9)


def as_good(impl: str, w: Tensor, h: Tensor | None) -> None:
    want, got = (ssz(w, h, **OPTS, impl=which) for which in ("reference", impl))
    w = w.to(got.dtype)
    assert (codes(w, got) == codes(w, want)).float().mean() >= SAME_CODES
    assert error(w, h, got).sum() <= error(w, h, want).sum() * (1 + SAME_ERROR)


@interpreted
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_is_as_good(shape, dtype, weighted, gen):
    w, h = make(shape, weighted, gen)
    as_good("triton", w.to(dtype), h)
    assert ssz(w * 0, h, **OPTS, impl="triton")[0, 0, 0] == 1


@pytest.mark.compiler
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_is_as_good_by_any_number_of_threads(shape, dtype, weighted, gen):
    w, h = make(shape, weighted, gen)
    w = w.to(dtype)
    as_good("native", w, h)
    alone = ssz(w, h, **OPTS, impl="native")
    assert ssz(w * 0, h, **OPTS, impl="native")[0, 0, 0] == 1
    torch.set_num_threads(3)
    try:
        assert torch.equal(ssz(w, h, **OPTS, impl="native"), alone)
    finally:
        torch.set_num_threads(1)
    if h is not None:
        same = ssz(w, h[:1], **OPTS, impl="native")
        assert torch.equal(same, ssz(w, h[:1].expand_as(h), **OPTS, impl="native"))


@pytest.mark.compiler
def test_native_in_float64_is_the_formula(gen):
    w, h = make((2, 3, 4, 32), True, gen)
    got, want = (ssz(w.double(), h.double(), **OPTS, impl=impl) for impl in ("native", "reference"))
    assert torch.allclose(got, want, rtol=1e-12, atol=0)


def test_the_bar_notices_one_start_less(gen):
    w, _ = make((1, 67, 2, 128), False, gen)
    want = ssz(w, None, **OPTS)
    less = ssz(w, None, **{**OPTS, "starts": (1.0, 0.8)})
    assert error(w, None, less).sum() > error(w, None, want).sum() * (1 + 100 * SAME_ERROR)


def test_refusals():
    w = torch.ones(1, 1, 1, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="unknown impl"):
        ssz(w, None, **OPTS, impl="fast")
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="float64"):
        ssz(w, None, **OPTS, impl="triton")
