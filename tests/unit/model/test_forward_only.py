"""What computes no gradient says so where one is asked for: a zero in its place would ruin a training silently."""

import pytest
import torch

from glm5.common.errors import TrainingError
from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.native import NativeLayer, NativeLinear, NativeNorm, use_native
from glm5.kernels import native_code
from glm5.kernels.grouped_experts import grouped_experts
from glm5.kernels.sparse_mla import sparse_mla
from glm5.model.linear import Linear
from glm5.model.lowering import use_invariant
from glm5.model.norm import RMSNorm
from glm5.model.packed import PackedView
from glm5.model.seams import Rope
from tests.support.cached import view_of
from tests.support.models import random_model

needs_compiler = pytest.mark.skipif(native_code.find_compiler() is None, reason="needs a C++ compiler")
NO_GRADIENT = "computes no gradient, and one is asked for"


def native_modules():
    linear, norm = Linear(8, 4), RMSNorm(8, 1e-6)
    for parameter in (*linear.parameters(), *norm.parameters()):
        torch.nn.init.ones_(parameter)
    return {"linear": NativeLinear(linear), "norm": NativeNorm(norm)}


@needs_compiler
@pytest.mark.parametrize("name", ["linear", "norm"])
@pytest.mark.parametrize("wants", ["input", "weight"])
def test_native_modules_refuse_a_gradient(name, wants):
    module = native_modules()[name].requires_grad_(wants == "weight")
    x = torch.ones(3, 8, requires_grad=wants == "input")
    with pytest.raises(TrainingError, match=NO_GRADIENT):
        module(x)
    with torch.no_grad():
        assert not module(x).requires_grad
    module.requires_grad_(requires_grad=False)
    assert not module(x.detach()).requires_grad  # nobody asks


@needs_compiler
@pytest.mark.parametrize("wants", ["input", "weight"])
def test_a_native_layer_refuses_a_gradient(wants, seed):
    model = random_model(seed).requires_grad_(requires_grad=False)
    layer = NativeLayer(model.cfg, model.model.layers[1], 1)
    if wants == "weight":
        model.model.layers[1].mlp.experts.down_proj.requires_grad_()
    x_TD = torch.randn(3, model.cfg.hidden_size, requires_grad=wants == "input")
    view = view_of(KVCache(model.cfg, 1, dtype=torch.float32), [([0], 0, 3)])
    rope = Rope.at(view.positions_T, model.cfg.qk_rope_head_dim, model.cfg.rope_theta, x_TD.detach())
    with pytest.raises(TrainingError, match=NO_GRADIENT):
        layer(x_TD, rope, view, None)


@needs_compiler
def test_a_native_model_cannot_be_trained(seed):
    model = random_model(seed)
    assert use_native(model)
    with pytest.raises(TrainingError, match=NO_GRADIENT):
        model.head(model(torch.arange(5), PackedView([5]))).sum().backward()


@pytest.mark.parametrize("part", ["gate", "experts", "shared_experts"])
@pytest.mark.parametrize("wants", ["input", "weight"])
def test_invariant_modules_refuse_a_gradient(part, wants, seed):
    model = random_model(seed).requires_grad_(requires_grad=False)
    use_invariant(model)
    moe = model.model.layers[-1].mlp
    x_TD = torch.randn(4, model.cfg.hidden_size)
    chosen = moe.gate(x_TD) if part == "experts" else ()
    if wants == "weight":
        getattr(moe, part).requires_grad_()
    module, x_TD = getattr(moe, part), x_TD.requires_grad_(wants == "input")
    with pytest.raises(TrainingError, match=NO_GRADIENT):
        module(x_TD, *chosen)
    with torch.no_grad():
        module(x_TD, *chosen)


@pytest.mark.parametrize("impl", ["invariant", "grouped_mm", "one_by_one"])
def test_forward_only_experts_refuse_a_gradient_of_routing_weights(impl):
    x_TD, gate_up, down = torch.randn(2, 16), torch.randn(4, 16, 16), torch.randn(4, 16, 8)
    weight_TA = torch.rand(2, 2, requires_grad=True)
    expert_TA = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    with pytest.raises(TrainingError, match=NO_GRADIENT):
        grouped_experts(x_TD, gate_up, down, weight_TA, expert_TA, impl=impl)


def test_invariant_attention_refuses_a_gradient_of_its_keys():
    pool = torch.randn(1, 4, 24, requires_grad=True)
    keys_TK, table_BN = torch.tensor([[0, 1, -1]], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    row_T, end_T = torch.zeros(1, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
    with pytest.raises(TrainingError, match=NO_GRADIENT):
        sparse_mla(
            torch.randn(1, 2, 24), pool, keys_TK, table_BN, row_T, end_T, scale=1.0, value_dim=16, impl="invariant"
        )
