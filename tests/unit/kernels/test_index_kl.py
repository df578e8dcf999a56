"""The streamed KL of an indexer against the naive one: value, gradients, and memory."""

import pytest
import torch
from torch import Tensor

from glm5.kernels import tiles
from glm5.kernels.index_kl import index_kl, streamed
from glm5.kernels.sparse_mla import sparse_mla
from glm5.testing.numerics import rel_rms
from tests.support.paged import CASES, make_keys, make_pool, make_where
from tests.support.peak import peak_bytes

J, I, H, L, C, K = 4, 6, 3, 8, 6, 5
SCALES = {"index_scale": 0.4, "scale": 0.3}
# Inputs are rounded before both runs; float64 1e-15, float32 6e-7 measured. bfloat16 rounds the gradients: 3e-3.
BUDGET = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-2}


class Case:
    def __init__(self, name: str, selection: str, gen: torch.Generator, dtype=torch.float64, num_served: int = 2):
        self.where = make_where(name, gen)
        num = self.where.num_queries
        # An indexer whose scores do not tie, so that they have a gradient everywhere.
        self.leaves = (
            torch.randn(num, J, I, generator=gen).to(dtype),
            make_pool(self.where, I, gen, dtype).nan_to_num(0.0),
            torch.randn(num, J, generator=gen).to(torch.promote_types(dtype, torch.float32)),
        )
        self.keys = make_keys(self.where, K, gen) if selection == "selected" else None
        self.attention = [
            (torch.randn(num, H, L, generator=gen).to(dtype), make_pool(self.where, L, gen, dtype).nan_to_num(0.0))
            for _ in range(num_served)
        ]

    def run(self, impl: str, wide: torch.dtype | None = None) -> tuple[Tensor, list[Tensor]]:
        """Loss and gradients, in the case's dtype or in `wide`."""
        leaves = [(one if wide is None else one.to(wide)).clone().requires_grad_() for one in self.leaves]
        served = []
        for q, pool in self.attention:
            q, pool = (one if wide is None else one.to(wide) for one in (q, pool))
            _, lse = sparse_mla(q, pool, self.keys, *self.where.args, scale=SCALES["scale"], value_dim=C)
            served.append((q, pool, lse))
        loss = index_kl(*leaves, served, self.keys, *self.where.args, **SCALES, impl=impl)
        loss.backward()
        return loss, [leaf.grad for leaf in leaves]


def worst(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]]) -> float:
    return max(rel_rms(g, w) for g, w in zip([got[0], *got[1]], [want[0], *want[1]], strict=True))


@pytest.fixture(params=["by tiles", "tiles in blocks", "by keys"])
def way(request, monkeypatch) -> str:
    if request.param == "tiles in blocks":
        monkeypatch.setattr(tiles, "_MIN_KEYS", 4)
        monkeypatch.setattr(tiles, "_MIN_QUERIES", 2)
        monkeypatch.setattr(tiles, "_CACHED", 4)
    if request.param == "by keys":
        monkeypatch.setattr(streamed, "_GATHER_FROM", 0)
        monkeypatch.setattr(streamed, "_GATHERED", {"cpu": 2 * K * L})
    return request.param


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("selection", ["selected", "all"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("nothing", "only padding")])
def test_agrees_with_the_naive_one_in_float64(name, selection, dtype, way, gen):
    case = Case(name, selection, gen, dtype)
    assert worst(case.run("streamed"), case.run("reference", torch.float64)) < BUDGET[dtype]


@pytest.mark.parametrize("selection", ["selected", "all"])
def test_budget_notices_a_key_and_a_layer(selection, way, gen):
    case = Case("ragged packed", selection, gen)
    want = case.run("reference")
    served = case.attention.pop()
    assert worst(case.run("streamed"), want) > 10 * BUDGET[torch.bfloat16]
    case.attention.append(served)
    if case.keys is not None:
        case.keys[-1, 0] = -1
        assert worst(case.run("streamed"), want) > 10 * BUDGET[torch.float32]


@pytest.mark.parametrize("selection", ["selected", "all"])
def test_gradients_are_those_of_finite_differences(selection, way, gen):
    case = Case("ragged packed", selection, gen)
    served = []
    for q, pool in case.attention:
        _, lse = sparse_mla(q, pool, case.keys, *case.where.args, scale=SCALES["scale"], value_dim=C)
        served.append((q, pool, lse))
    inputs = tuple(one.requires_grad_() for one in case.leaves)
    assert torch.autograd.gradcheck(
        lambda *leaves: index_kl(*leaves, served, case.keys, *case.where.args, **SCALES), inputs, fast_mode=True
    )


def test_no_queries_and_padding_cost_nothing(gen):
    for name in ("nothing", "only padding"):
        loss, grads = Case(name, "all", gen).run("streamed")
        assert loss == 0
        assert all(not grad.any() for grad in grads)


def test_memory_does_not_grow_with_queries_times_keys(gen, monkeypatch):
    """Warm-up over all causal keys: twice the context, about twice the memory; the naive one takes four times."""
    monkeypatch.setattr(tiles, "_CACHED", 1 << 12)

    def peak(impl: str, num: int) -> int:
        leaves = [torch.randn(*shape, generator=gen).requires_grad_() for shape in ((num, J, I), (1, num, I), (num, J))]
        where = (torch.zeros(1, 1).int(), torch.zeros(num).int(), torch.arange(1, num + 1).int())
        q, pool = torch.randn(num, H, L, generator=gen), torch.randn(1, num, L, generator=gen)
        _, lse = sparse_mla(q, pool, None, *where, scale=SCALES["scale"], value_dim=C)
        with peak_bytes() as peak:
            index_kl(*leaves, [(q, pool, lse)], None, *where, **SCALES, impl=impl).backward()
        return peak.at_most

    assert peak("streamed", 512) < 2.3 * peak("streamed", 256)
    assert peak("streamed", 512) < 4 * 512 * 512
    assert peak("reference", 512) > 3 * peak("reference", 256)


def test_unknown_impl(gen):
    with pytest.raises(ValueError, match="index_kl: unknown impl 'fused'"):
        Case("one query, one key", "all", gen).run("fused")
