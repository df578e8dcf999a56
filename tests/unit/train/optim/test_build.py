"""Which tensor is whose, rates and decay by name, clipping in two parts, and state that is the same on every side."""

import re

import pytest
import torch
from torch import nn

from glm5.common.errors import CheckpointError, ConfigError
from glm5.config.presets import preset
from glm5.config.step import OptimizerConfig
from glm5.model import Glm5
from glm5.model.init import init_weights
from glm5.train.optim.build import Optimizers
from glm5.train.optim.table import TABLE, rule_of

LR = 0.01


def model() -> Glm5:
    return init_weights(Glm5(preset("tiny")), seed=1)


def optimizers(of: Glm5, **options) -> Optimizers:
    return Optimizers(dict(of.named_parameters()), of.cfg, OptimizerConfig(**options))


def steps(of: Glm5, by: Optimizers, numbers: range) -> None:
    """The gradients of step n are a function of n; every other step the indexers have none."""
    for number in numbers:
        gen = torch.Generator().manual_seed(number)
        for name, weight in by.named.items():
            grad = torch.randn(weight.shape, generator=gen)
            weight.grad = None if ".indexer." in name and number % 2 == 0 else grad
        by.clip()
        by.step(LR)


def test_every_parameter_has_a_rule_and_every_rule_a_parameter():
    whole = model()
    whole.add_value_head()
    names = [name for name, _ in whole.named_parameters()]
    assert {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names} == TABLE.keys()
    with pytest.raises(ConfigError, match=r"no rule for the parameter model\.layers\.0\.new\.weight"):
        rule_of("model.layers.0.new.weight", OptimizerConfig())


def test_matrices_are_muons_and_the_rest_adamws():
    of = model()
    by = optimizers(of)
    muon = {name for name, state in by.state_dict().items() if state.keys() == {"momentum"}}
    rest = {name for name in by.named if "norm" in name or name in ("lm_head.weight", "model.embed_tokens.weight")}
    assert muon == by.named.keys() - rest
    assert optimizers(of, muon_lm_head=True).state_dict()["lm_head.weight"].keys() == {"momentum"}
    assert optimizers(of, kind="adamw").muon is None


@pytest.mark.parametrize(
    ("options", "query", "key_value"),
    [({}, (24,), (16, 16)), ({"split_rope": True}, (16, 8), (16, 16)), ({"split": False}, (), ())],
)
def test_heads_are_split_as_asked(options, query, key_value):
    of = model()
    rows = optimizers(of, **options).muon._rows
    attention = of.model.layers[0].self_attn
    assert rows.get(attention.q_b_proj.weight, ()) == query
    assert rows.get(attention.kv_b_proj.weight, ()) == key_value
    assert rows.get(attention.indexer.wq_b.weight, ()) == ((16,) if options.get("split", True) else ())
    assert rows[of.model.layers[1].mlp.experts.gate_up_proj] == (32, 32)
    assert attention.o_proj.weight not in rows


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_rates_and_decay_by_name(kind):
    of = model()
    by = optimizers(of, kind=kind, matrix_lr=2.0, embedding_lr=10.0, indexer_lr=0.5)
    by.step(LR)
    group_of = {weight: group for one in by.each for group in one.param_groups for weight in group["params"]}
    got = {name: (group_of[by.named[name]]["lr"] / LR, group_of[by.named[name]]["weight_decay"]) for name in by.named}
    attention = "model.layers.0.self_attn."
    assert got["model.embed_tokens.weight"] == pytest.approx((10.0, 0.1))
    assert got["lm_head.weight"] == pytest.approx((1.0, 0.1))
    assert got["model.norm.weight"] == pytest.approx((1.0, 0.0))
    assert got[attention + "o_proj.weight"] == pytest.approx((2.0, 0.1))
    assert got[attention + "indexer.wk.weight"] == pytest.approx((1.0, 0.1))
    assert got[attention + "indexer.k_norm.bias"] == pytest.approx((0.5, 0.0))


def test_the_indexers_gradients_are_clipped_apart():
    of = model()
    by = optimizers(of)
    for name, weight in by.named.items():
        weight.grad = torch.full_like(weight, 100.0 if ".indexer." in name else 1e-6)
    before = of.lm_head.weight.grad.clone()
    norms = by.clip()
    assert norms["indexer"] > 1 > norms["trunk"]
    assert torch.equal(of.lm_head.weight.grad, before)
    clipped = [weight.grad for name, weight in by.named.items() if ".indexer." in name]
    assert torch.stack([grad.norm() for grad in clipped]).norm() == pytest.approx(1.0, rel=1e-4)
    norms = optimizers(of, max_grad_norm=None).clip()
    assert norms["indexer"] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("momentum_dtype", [None, "bfloat16"])
def test_saved_and_loaded_equals_straight_on(momentum_dtype):
    straight, stopped, resumed = model(), model(), model()
    steps(straight, optimizers(straight, momentum_dtype=momentum_dtype), range(4))
    first = optimizers(stopped, momentum_dtype=momentum_dtype)
    steps(stopped, first, range(2))
    saved = {name: {key: one.clone() for key, one in state.items()} for name, state in first.state_dict().items()}
    resumed.load_state_dict(stopped.state_dict())
    second = optimizers(resumed, momentum_dtype=momentum_dtype)
    second.load_state_dict(saved)
    steps(resumed, second, range(2, 4))
    for name, weight in straight.named_parameters():
        assert torch.equal(weight, resumed.get_parameter(name)), name


def test_state_has_the_same_shape_before_and_after_steps():
    of = model()
    by = optimizers(of)
    before = {name: {key: (one.shape, one.dtype) for key, one in state.items()} for name, state in _states(by)}
    steps(of, by, range(3))
    assert before == {name: {key: (one.shape, one.dtype) for key, one in state.items()} for name, state in _states(by)}
    numel = {name: weight.numel() for name, weight in by.named.items()}
    muon = [name for name, state in _states(by) if "momentum" in state]
    assert by.state_bytes() == 4 * sum(numel[name] * (1 if name in muon else 2) for name in numel) + 4 * (
        len(numel) - len(muon)
    )


def _states(by: Optimizers):
    return by.state_dict().items()


def test_state_of_other_settings_is_refused():
    of = model()
    saved = optimizers(of).state_dict()
    with pytest.raises(CheckpointError, match=r"optimizer state of .*start from its weights alone"):
        optimizers(of, kind="adamw").load_state_dict(saved)
    of.lm_head.weight.requires_grad_(requires_grad=False)
    with pytest.raises(CheckpointError, match=r"differ, first in lm_head\.weight"):
        optimizers(of).load_state_dict(saved)


def test_frozen_parameters_are_left_out():
    of = model()
    for name, weight in of.named_parameters():
        weight.requires_grad_(".indexer." in name)
    by = optimizers(of)
    assert all(".indexer." in name for name in by.named)
    assert isinstance(next(iter(by.named.values())), nn.Parameter)
