"""A block of GPTQ's columns: Triton under the interpreter gives the reference's codes."""

import pytest
import torch

from glm5.kernels.gptq_block import gptq_block
from tests.support.interpreter import interpreted


@interpreted
@pytest.mark.parametrize("by_column", [False, True])
def test_triton_gives_the_references_codes(by_column, gen):
    w = torch.randn(2, 20, 24, generator=gen)
    factor = torch.eye(24) + 0.1 * torch.randn(2, 24, 24, generator=gen).triu(1)
    scale = torch.rand(2, 20, 24 if by_column else 1, generator=gen) + 0.2
    limits = {"quant_min": -8.0, "quant_max": 7.0, "fp8": False}
    codes, wrong = gptq_block(w[..., 3:], factor[:, 3:, 3:], scale[..., 3:] if by_column else scale, **limits)
    got, got_wrong = gptq_block(
        w[..., 3:], factor[:, 3:, 3:], scale[..., 3:] if by_column else scale, **limits, impl="triton"
    )
    assert torch.equal(got, codes)
    assert torch.allclose(got_wrong, wrong, atol=1e-5)
    factor[:, 3, 4] += 0.5
    other, _ = gptq_block(w[..., 3:], factor[:, 3:, 3:], scale[..., 3:] if by_column else scale, **limits)
    assert not torch.equal(got, other)


def test_mistakes():
    with pytest.raises(ValueError, match="unknown impl"):
        gptq_block(
            torch.ones(1, 1, 1),
            torch.ones(1, 1, 1),
            torch.ones(1, 1, 1),
            quant_min=-8,
            quant_max=7,
            fp8=False,
            impl="x",
        )
