"""Steps whose rows are dealt out to ranks: what ranks compute that have all rows, bit for bit where that is so."""

import pytest
import torch

from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.config.presets import preset
from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.fused import row_sharding
from glm5.engine.runner.fused.fused_linear import Rows
from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.kernels.block_scaled import quantize_blocks
from glm5.kernels.fp8_linear.pending import PendingLinear
from glm5.kernels.grouped_experts import ExpertOutputs
from glm5.kernels.row_codes import quantize
from glm5.model.linear import BlockScaledLinear, Linear
from glm5.model.norm import RMSNorm
from glm5.parallel.apply import connect
from glm5.parallel.group import ALONE
from tests.support.models import random_model
from tests.support.ranks import by_threads
from tests.support.steps import Steps, far, random_ids

MAX_LEN = 64
RANKS = 2
# Products in FP8 are exact up to one rounding; in float32 a share of the rows may be added up in another order.
BUDGET = 5e-6
SIZES = {"moe_intermediate_size": 256, "intermediate_size": 512, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16}
PASSES = {
    "whole": ([(0, 0, 5), (1, 0, 3)], True),
    "few keys": ([(0, 0, 5), (1, 0, 3)], False),
    "selected": ([(0, 0, 30), (1, 0, 20)], False),
    "behind others": ([(0, 30, 2), (1, 20, 3)], False),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("between") / "model"
    save(random_model(7, preset("tiny").replace(**SIZES)), path, dtype="fp8")
    return path


def computed(checkpoint, dtype, min_rows, monkeypatch):
    """By rank: hidden states of target and draft layer of all passes, experts that were chosen."""
    monkeypatch.setattr(row_sharding, "MIN_SHARDED_ROWS", min_rows)

    def work(group):
        model = load(checkpoint, dtype, shard=group.shard)
        connect(model, group)
        lowered, steps = FusedModel(model, MAX_LEN, group), Steps(model, 2, MAX_LEN)
        received, out = lowered.record_routing(), []
        with torch.inference_mode():
            for seed, (rows, whole) in enumerate(PASSES.values()):
                # With one row of padding, or two, so that ranks divide them.
                count = sum(count for _, _, count in rows)
                padding = RANKS - count % RANKS
                ids, view = random_ids(model, count + padding, seed), steps.view(rows, padding=padding, whole=whole)
                hidden = lowered.hidden(ids, view)
                drafted, _ = lowered.draft(ids.roll(-1), hidden, view)
                out += [hidden[:count], drafted[:count]]
        return out, [torch.cat(each) for each in received]

    return by_threads(RANKS, work)


@pytest.mark.parametrize("dtype", ["float32", "auto"], ids=["float32", "fp8"])
def test_dealt_rows_are_those_of_the_whole(checkpoint, dtype, monkeypatch):
    whole = computed(checkpoint, dtype, 1 << 20, monkeypatch)
    dealt = computed(checkpoint, dtype, 1, monkeypatch)
    for got, experts in dealt:
        assert all(torch.equal(one, other) for one, other in zip(got, dealt[0][0], strict=True)), "ranks differ"
        for own, want in zip(got, whole[0][0], strict=True):
            assert torch.equal(own, want) or (dtype == "float32" and far(own, want) < BUDGET)
            assert far(own * 1.02, want) > BUDGET
        assert all(torch.equal(one, want) for one, want in zip(experts, whole[0][1], strict=True))


def test_ranks_share_out_the_selection_of_keys(checkpoint, monkeypatch):
    requested, select_keys = [], KVCache.select_keys

    def noted(self, layer_idx, q_TJI, *given, **opts):
        requested.append((len(q_TJI), opts["num_shares"]))
        return select_keys(self, layer_idx, q_TJI, *given, **opts)

    monkeypatch.setattr(KVCache, "select_keys", noted)
    computed(checkpoint, "float32", 1, monkeypatch)
    assert set(requested) == {(26, RANKS), (3, RANKS)}  # of 52 and 6 rows


def test_rows_in_int8_are_gathered_with_their_scales():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    choice = torch.arange(12, dtype=torch.int32).view(6, 2)

    def gather_inputs(group):
        own = [each.unflatten(0, (RANKS, -1))[group.shard.rank] for each in (x, choice)]
        return row_sharding.ShardedRows(group).gather_inputs(Rows(own[0], quantize(own[0], "int8")), own[1])

    for rows, chosen in by_threads(RANKS, gather_inputs):
        assert torch.equal(rows.x_TD, x)
        assert torch.equal(chosen, choice)
        assert all(torch.equal(got, want) for got, want in zip(rows.quantized, quantize(x, "int8"), strict=True))


@pytest.mark.parametrize("kind", [row_sharding.ReplicatedRows, row_sharding.ShardedRows], ids=["replicated", "sharded"])
def test_expert_outputs_are_added_up_and_released(kind, monkeypatch):
    def summed(self):
        routed = self.y[: 3 * self.num_tokens].view(self.num_tokens, 3, -1)
        return routed.sum(1) + self.y[3 * self.num_tokens :]

    monkeypatch.setattr(ExpertOutputs, "summed", summed)
    gen = torch.Generator().manual_seed(0)
    norm, residual_TD = RMSNorm(8, 1e-5), torch.randn(5, 8, generator=gen)
    torch.nn.init.ones_(norm.weight)
    new = ExpertOutputs(torch.randn(20, 8, generator=gen), 5, 3, has_shared=True)
    want = kind(ALONE).reduce_add_norm(new.summed(), residual_TD, norm, None)
    got = kind(ALONE).reduce_add_norm(new, residual_TD, norm, None)
    assert torch.equal(got[0].x_TD, want[0].x_TD)
    assert torch.equal(got[1], want[1])
    assert not hasattr(new, "y")


@pytest.mark.parametrize("kind", [row_sharding.ReplicatedRows, row_sharding.ShardedRows], ids=["replicated", "sharded"])
def test_products_are_those_of_their_weights(kind):
    """ShardedRows, FP8 products are computed by whoever sends their rows."""
    gen = torch.Generator().manual_seed(0)
    norm, (x_TD, residual_TD) = RMSNorm(128, 1e-5), torch.randn(2, 5, 128, generator=gen)
    torch.nn.init.ones_(norm.weight)
    plain, fp8 = Linear(128, 128), BlockScaledLinear(128, 128)
    weight = quantize_blocks(torch.randn(128, 128, generator=gen))
    with torch.no_grad():
        plain.weight.copy_(torch.randn(128, 128, generator=gen))
        fp8.weight.copy_(weight.data)
        fp8.weight_scale_inv.copy_(weight.scale)
    for linear in (plain, fp8):
        new = kind(ALONE).product(Rows(x_TD), linear)
        assert isinstance(new, PendingLinear) == (kind is row_sharding.ShardedRows and linear is fp8)
        want = kind(ALONE).reduce_add_norm(linear(x_TD), residual_TD, norm, None)
        assert torch.equal(kind(ALONE).reduce_add_norm(new, residual_TD, norm, None)[1], want[1])
