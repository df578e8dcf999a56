"""Smoothing on a GPU: members of a stack of experts get what each gets alone."""

import pytest
import torch

from glm5.quant.minmax import quantize
from glm5.quant.record import INT4_CHANNEL, W4A8, W8A8
from glm5.quant.smooth import Target, flex_awq, flex_smooth
from tests.support.weights import bursty, laplace

pytestmark = pytest.mark.gpu

LEAST_SAME = 0.9999  # of the codes
EXPERTS = 16


@pytest.mark.parametrize(("search", "scheme"), [(flex_smooth, W8A8), (flex_awq, W4A8)], ids=["smooth", "awq"])
def test_a_stack_is_its_members(search, scheme, seed):
    gen = torch.Generator().manual_seed(seed)
    weight, x = laplace(gen, EXPERTS, 256, 2048).cuda(), bursty(gen, EXPERTS, 256, 2048).cuda()
    whole = search(x, [Target(weight, scheme)])
    for e in range(EXPERTS):
        alone = search(x[e], [Target(weight[e], scheme)])
        assert (alone.alpha, alone.beta) == (whole.alpha[e], whole.beta[e])
        codes = [quantize(weight[e] * scale, INT4_CHANNEL).codes for scale in (alone.scale, whole.scale[e])]
        assert (codes[0] == codes[1]).float().mean() >= LEAST_SAME
