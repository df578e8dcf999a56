"""Layers that are called directly say so to those who would hook them."""

import pytest
import torch

from glm5.model.linear import Linear
from glm5.model.norm import RMSNorm


@pytest.mark.parametrize("module", [Linear(4, 3), RMSNorm(4, 1e-5)], ids=lambda module: type(module).__name__)
def test_a_hook_that_would_never_run_is_refused(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    x = torch.randn(2, 4)
    assert torch.equal(module(x), module.forward(x))
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        with pytest.raises(TypeError, match="runs no hooks"):
            register(print)
