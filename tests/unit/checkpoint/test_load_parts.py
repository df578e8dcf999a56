"""Ranks read their own parts: together they hold what one reader holds, in every format."""

import sys

import pytest
import torch

from glm5.checkpoint import shard
from glm5.checkpoint.load import load
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.save import save
from glm5.checkpoint.update import read_all, replace, stage
from glm5.common.errors import ConfigError
from glm5.config.presets import preset
from glm5.config.tensors import tensor_specs
from glm5.parallel.table import Shard, scale_span, span_of
from tests.support.models import random_model

# Parts for two ranks are whole blocks, or lie within one; for four ranks those of the dense MLP do not.
WIDE = {
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
}


def parts(model, shard):
    """What a rank must hold of a whole model, under names on disk."""
    state = model.state_dict()
    for spec in tensor_specs(model.cfg):
        for name in (spec.name, spec.name + SCALE_SUFFIX):
            slot = slot_of(name)
            if slot.parameter not in state:
                continue
            tensor, span = slot.view(state[slot.parameter]), span_of(spec.name, spec.shape, shard)
            if span is not None:
                span = scale_span(span) if name.endswith(SCALE_SUFFIX) else span
                tensor = tensor.narrow(span.dim, span.start, span.stop - span.start)
            yield name, tensor


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / request.param
    save(
        random_model(3, preset("tiny").replace(**WIDE), torch.bfloat16),
        path,
        dtype="fp8" if request.param == "fp8" else "auto",
    )
    return path


def held(model):
    state = model.state_dict()
    return {name: slot_of(name).view(state[slot_of(name).parameter]) for name in names(model)}


def names(model):
    state = model.state_dict()
    every = [name for spec in tensor_specs(model.cfg) for name in (spec.name, spec.name + SCALE_SUFFIX)]
    return [name for name in every if slot_of(name).parameter in state]


def same(got, want):
    return got.dtype == want.dtype and torch.equal(
        got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_parts_are_those_of_the_whole(checkpoint, dtype):
    whole = load(checkpoint, dtype)
    for rank in range(2):
        model = load(checkpoint, dtype, shard=Shard(rank, 2))
        assert model.cfg == whole.cfg
        own, wanted = held(model), dict(parts(whole, Shard(rank, 2)))
        assert own.keys() == wanted.keys()
        assert [name for name in own if not same(own[name], wanted[name])] == []


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_readers_share_a_large_tensor(checkpoint, dtype, monkeypatch):
    whole, sizes = load(checkpoint, dtype, shard=Shard(1, 2)), dict[str, list[int]]()
    read_into = shard.read_into

    def noted(directory, entry, out, first_byte=0):
        sizes.setdefault(entry.name, []).append(out.nbytes)
        read_into(directory, entry, out, first_byte)

    module = sys.modules[load.__module__]
    monkeypatch.setattr(module, "read_into", noted)
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    own, wanted = held(load(checkpoint, dtype, shard=Shard(1, 2))), held(whole)
    assert [name for name in own if not same(own[name], wanted[name])] == []
    assert len(sizes["lm_head.weight"]) > 1
    assert max(sizes["lm_head.weight"]) <= 4096
    assert sum(sizes["lm_head.weight"]) == wanted["lm_head.weight"].numel() * 2


def test_new_weights_and_weights_read_again_are_parts_too(checkpoint):
    model = load(checkpoint, shard=Shard(1, 2))
    before = {name: tensor.clone() for name, tensor in held(model).items()}
    for tensor in model.state_dict().values():
        tensor.view(torch.uint8).zero_()
    replace(model, stage(model, checkpoint, Shard(1, 2)))
    assert [name for name, tensor in held(model).items() if not same(tensor, before[name])] == []
    for tensor in model.state_dict().values():
        tensor.view(torch.uint8).zero_()
    read_all(model, checkpoint, Shard(1, 2))
    assert [name for name, tensor in held(model).items() if not same(tensor, before[name])] == []


def test_blocks_that_two_ranks_would_share_are_refused(checkpoint):
    if checkpoint.name == "fp8":
        with pytest.raises(ConfigError, match="tensor_parallel_size: got 4, which cuts model"):
            load(checkpoint, shard=Shard(0, 4))
    else:
        load(checkpoint, shard=Shard(3, 4))
    whole, part = load(checkpoint, "float32"), load(checkpoint, "float32", shard=Shard(2, 4))
    wanted = dict(parts(whole, Shard(2, 4)))
    assert all(same(tensor, wanted[name]) for name, tensor in held(part).items())
