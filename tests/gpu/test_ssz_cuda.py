"""ssz on a GPU, at widths of GLM-5's experts: as good as the reference, the same twenty times."""

import pytest
import torch

from glm5.quant.minmax import encode, fake_quantize
from glm5.quant.record import INT4_CHANNEL, INT4_GROUP
from glm5.quant.ssz import ssz
from tests.support.weights import bursty, laplace

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("grid", [INT4_CHANNEL, INT4_GROUP], ids=["channel", "group"])
@pytest.mark.parametrize("shape", [(3, 100, 6144), (3, 100, 2048)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_codes_and_error_are_the_cpus(grid, shape, weighted, seed):
    gen = torch.Generator().manual_seed(seed)
    w = laplace(gen, *shape).bfloat16()
    h = bursty(gen, shape[0], 16, shape[2]).square().mean(-2) if weighted else None
    want = ssz(w, grid, h)
    on_card = w.cuda(), grid, None if h is None else h.cuda()
    got = ssz(*on_card)
    assert all(torch.equal(ssz(*on_card), got) for _ in range(20))
    same = encode(w, grid, got.cpu()) == encode(w, grid, want)
    assert same.float().mean() >= 0.9999
    errors = [(fake_quantize(w.float(), grid, s) - w.float()).double().norm() for s in (got.cpu(), want)]
    assert errors[0] <= errors[1] * (1 + 1e-5) or weighted
