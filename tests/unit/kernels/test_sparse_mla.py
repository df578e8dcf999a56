"""Every implementation of sparse_mla against a loop over queries in float64, and against each other."""

import numpy as np
import pytest
import torch

from glm5.kernels.sparse_mla import reference, sparse_mla
from glm5.testing.numerics import rel_rms
from tests.support.floats import BF16, round_array
from tests.support.paged import CASES, Where, make_keys, make_pool, make_where
from tests.support.peak import peak_bytes

IMPLS = ["gather", "chunked", "masked"]
FORWARD = [*IMPLS, "grouped", "invariant"]
H, L, C, K, SCALE = 3, 6, 4, 5, 0.3
# Inputs are rounded before both runs. Measured: float64 3e-16, float32 1.4e-7. In bfloat16 the oracle rounds p and out
# as the definition does: measured 0, but a p that lies on a midpoint may fall to either side, 2^-8 of one output.
BUDGET = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-3}
LSE_BUDGET = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}
# Backward in float32 against float64 autograd of the definition. Measured 1.3e-7.
GRAD_BUDGET = 2e-6
BFLOAT16_GRAD_BUDGET = 1e-2  # p and both gradients are rounded: measured 3.5e-3
SELECTIONS = ["selected", "all"]


def make_case(name, selection, gen, dtype=torch.float64):
    where = make_where(name, gen)
    q = torch.randn(where.num_queries, H, L, generator=gen).to(dtype)
    keys = make_keys(where, K, gen) if selection == "selected" else None
    return where, q, make_pool(where, L, gen, dtype), keys


def oracle(where: Where, q, pool, keys, scale=SCALE, rounds=lambda x: x) -> tuple[torch.Tensor, torch.Tensor]:
    latents = where.logical(pool)
    out, lse = np.zeros((where.num_queries, H, C)), np.full((where.num_queries, H), -np.inf)
    for t, (row, end) in enumerate(zip(where.row_T.tolist(), where.end_T.tolist(), strict=True)):
        chosen = [s for s in (range(end) if keys is None else keys[t].tolist()) if 0 <= s < end]
        if not chosen:
            continue
        latent = latents[row][chosen]
        logits = q[t].double().numpy() @ latent.T * scale
        total = np.exp(logits).sum(-1)
        lse[t] = np.log(total)
        out[t] = rounds(rounds(np.exp(logits) / total[:, None]) @ latent[:, :C])
    return torch.from_numpy(out), torch.from_numpy(lse)


def run(where, q, pool, keys, impl, **changed):
    return sparse_mla(q, pool, keys, *where.args, **{"scale": SCALE, "value_dim": C, "impl": impl, **changed})


def whole(where, keys, impl) -> torch.Tensor | None:
    """`keys`, or all of them for an implementation that wants them named."""
    return torch.arange(where.num_keys).expand(where.num_queries, -1) if keys is None and impl == "invariant" else keys


def errors(got, want) -> tuple[float, float]:
    out, lse = got
    assert torch.equal(lse.isneginf(), want[1].isneginf())
    assert not out.isnan().any()
    assert (out[want[1].isneginf()] == 0).all()
    seen = want[1].isfinite()
    return rel_rms(out, want[0]), rel_rms(lse[seen], want[1][seen])


@pytest.mark.parametrize("impl", FORWARD)
@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name, selection, dtype, impl, gen):
    where, q, pool, keys = make_case(name, selection, gen, dtype)
    out, lse = run(where, q, pool, whole(where, keys, impl), impl)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    rounds = (lambda x: round_array(x, BF16)) if dtype == torch.bfloat16 else (lambda x: x)
    out_error, lse_error = errors((out, lse), oracle(where, q, pool, keys, rounds=rounds))
    assert out_error < BUDGET[dtype]
    assert lse_error < LSE_BUDGET[dtype]


@pytest.mark.parametrize("impl", FORWARD)
def test_budget_notices_one_percent_of_scale_and_one_key(impl, gen):
    where, q, pool, keys = make_case("ragged packed", "selected", gen, torch.float32)
    want = oracle(where, q, pool, keys)
    assert errors(run(where, q, pool, keys, impl, scale=1.01 * SCALE), want)[0] > 10 * BUDGET[torch.float32]
    fewer = keys.clone()
    fewer[-1, 0] = -1
    assert errors(run(where, q, pool, fewer, impl), want)[0] > 10 * BUDGET[torch.bfloat16]


@pytest.mark.parametrize("impl", FORWARD)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_paged_equals_contiguous(name, selection, impl, gen):
    where, q, pool, keys = make_case(name, selection, gen, torch.float32)
    plain, plain_pool = where.contiguous(pool)
    keys = whole(where, keys, impl)
    got, want = run(plain, q, plain_pool, keys, impl), run(where, q, pool, keys, impl)
    assert max(errors(got, want)) < BUDGET[torch.float32]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(
    "name", ["equal requests", "ragged packed", "chunked prefill beside decode", "decode with padding"]
)
def test_gradients(name, selection, impl, gen):
    where, q, pool, keys = make_case(name, selection, gen)
    pool = pool.nan_to_num(0.5)  # gradcheck cannot perturb a NaN

    def finite(q, pool):
        out, lse = run(where, q, pool, keys, impl)
        return out, lse[lse.isfinite()]

    # Entry by entry for the definition; the others along random directions, in a tenth of the time.
    inputs = (q.requires_grad_(), pool.requires_grad_())
    assert torch.autograd.gradcheck(finite, inputs, fast_mode=impl != "gather")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_agree_with_float64(dtype, selection, impl, gen):
    where, q, pool, keys = make_case("ragged packed", selection, gen, dtype)
    grad = torch.randn(where.num_queries, H, C, generator=gen).to(dtype)
    got = [t.clone().requires_grad_() for t in (q, pool)]
    want = [t.double().requires_grad_() for t in (q, pool)]
    run(where, *got, keys, impl)[0].backward(grad)
    run(where, *want, keys, "gather")[0].backward(grad.double())
    budget = GRAD_BUDGET if dtype == torch.float32 else BFLOAT16_GRAD_BUDGET
    for g, w in zip(got, want, strict=True):
        assert g.grad.dtype == dtype
        assert rel_rms(g.grad, w.grad.nan_to_num()) < budget


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", ["decode with padding", "only padding", "chunked prefill beside decode"])
def test_nothing_visible_gives_zeros_and_no_nan_backward(name, selection, impl, gen):
    where, q, pool, keys = make_case(name, selection, gen)
    q.requires_grad_(), pool.requires_grad_()
    out, lse = run(where, q, pool, keys, impl)
    empty = where.end_T == 0
    assert (out[empty] == 0).all()
    assert lse[empty].isneginf().all()
    (out.sum() + lse[~empty].sum()).backward()
    assert not q.grad.isnan().any()
    assert (q.grad[empty] == 0).all()
    assert (pool.grad[pool.isnan()] == 0).all()


@pytest.mark.parametrize("impl", FORWARD)
def test_large_logits_do_not_overflow(impl, gen):
    where, q, pool, keys = make_case("ragged packed", "selected", gen, torch.float32)
    out, lse = run(where, q * 1000, pool, keys, impl)
    assert out.isfinite().all()
    assert lse.abs().max() > 100


@pytest.mark.parametrize("impl", ["gather", "chunked"])
def test_gathering_in_pieces_is_the_same(impl, gen, monkeypatch):
    where, q, pool, keys = make_case("ragged packed", "selected", gen)

    def both_ways():
        leaves = [one.clone().requires_grad_() for one in (q, pool)]
        out, lse = run(where, *leaves, keys, impl)
        out.sum().backward()
        return out, lse.exp(), *(leaf.grad for leaf in leaves)

    whole = both_ways()
    monkeypatch.setattr(reference, "_GATHERED_CPU", 2 * K * L)  # two queries at a time
    assert all(rel_rms(got, want) < BUDGET[torch.float64] for got, want in zip(both_ways(), whole, strict=True))


def test_peak_memory_of_chunks_does_not_grow_with_gathered_latents(gen, monkeypatch):
    """Beyond what goes in and comes out, six chunks of gathered latents; all of them would be 32."""
    num, heads, width, k = 256, 4, 16, 32
    q = torch.randn(num, heads, width, generator=gen).requires_grad_()
    pool = torch.randn(1, num, width, generator=gen).requires_grad_()
    end = torch.arange(1, num + 1)
    keys = torch.stack([torch.randperm(num, generator=gen)[:k].sort().values for _ in range(num)]).int()
    where = (torch.zeros(1, 1, dtype=torch.int32), torch.zeros(num, dtype=torch.int32), end.int())
    chunk = num // 32
    monkeypatch.setattr(reference, "_GATHERED_CPU", chunk * k * width)

    def peak(impl: str, keys) -> int:
        q.grad = pool.grad = None
        with peak_bytes() as peak:
            sparse_mla(q, pool, keys, *where, scale=SCALE, value_dim=12, impl=impl)[0].sum().backward()
        return peak.at_most

    in_and_out = 4 * num * heads * (3 * width + 2) + 4 * 4 * num * width
    assert peak("chunked", keys) < in_and_out + 6 * 4 * chunk * k * width
    assert peak("gather", keys) > 4 * num * k * width


def test_auto_gathers_again_when_it_learns(monkeypatch):
    taken = []
    monkeypatch.setattr("glm5.kernels.sparse_mla.chunked.sparse_mla", lambda *_args, **_kwargs: taken.append("chunked"))
    num = 640
    q, pool = torch.zeros(num, H, L).requires_grad_(), torch.zeros(1, num, L)
    where = (torch.zeros(1, 1, dtype=torch.int32), torch.zeros(num, dtype=torch.int32), torch.full((num,), num))
    sparse_mla(q, pool, torch.zeros(num, 32, dtype=torch.int32), *where, scale=SCALE, value_dim=C)
    with torch.no_grad():
        sparse_mla(q, pool, torch.zeros(num, 32, dtype=torch.int32), *where, scale=SCALE, value_dim=C)
    assert taken == ["chunked"]


@pytest.mark.parametrize(
    ("num_requests", "num_queries", "num_keys", "selected", "want"),
    [
        (1, 64, 64, 32, "masked"),  # a short prompt
        (1, 640, 640, 32, "gather"),  # a long one
        (8, 8, 64, 32, "masked"),  # decoding, most keys selected
        (8, 8, 400, 32, "gather"),  # decoding, few of many
        (8, 8, 400, None, "masked"),  # every key
    ],
)
def test_auto_takes_the_cheaper(num_requests, num_queries, num_keys, selected, want, monkeypatch):
    taken = []
    for name, file in (("gather", "reference"), ("masked", "masked")):
        run = lambda *_args, name=name, **_kwargs: taken.append(name)  # noqa: E731
        monkeypatch.setattr(f"glm5.kernels.sparse_mla.{file}.sparse_mla", run)
    row = torch.arange(num_requests).repeat_interleave(num_queries // num_requests)
    table, end = torch.arange(2 * num_requests).view(-1, 2), torch.full((num_queries,), num_keys)
    keys = None if selected is None else torch.zeros(num_queries, selected)
    pool = torch.zeros(2 * num_requests, 1000, L)  # what no query sees does not count
    sparse_mla(torch.zeros(num_queries, H, L), pool, keys, table, row, end, scale=SCALE, value_dim=C)
    assert taken == [want]


def test_unknown_implementation(gen):
    where, q, pool, keys = make_case("one query, one key", "selected", gen)
    with pytest.raises(ValueError, match="sparse_mla: unknown impl 'reference', expected one of auto, cuda, triton"):
        run(where, q, pool, keys, "reference")


def test_invariant_wants_its_keys_named(gen):
    where, q, pool, _ = make_case("one query, one key", "all", gen)
    with pytest.raises(ValueError, match=r"sparse_mla\[invariant\] .* give keys_TK, padded with -1; got None"):
        run(where, q, pool, None, "invariant")


@pytest.mark.parametrize("impl", IMPLS)
def test_gradient_budgets_notice_one_percent_of_scale_and_one_key(impl, gen):
    """The control of `test_gradients_agree_with_float64`, for both inputs."""
    where, q, pool, keys = make_case("ragged packed", "selected", gen, torch.float32)
    grad = torch.randn(where.num_queries, H, C, generator=gen)
    fewer = keys.clone()
    fewer[-1, 0] = -1

    def gradients(keys, dtype, impl, **changed):
        leaves = [t.to(dtype).requires_grad_() for t in (q.clone(), pool.clone())]
        run(where, *leaves, keys, impl, **changed)[0].backward(grad.to(dtype))
        return [leaf.grad.nan_to_num() for leaf in leaves]

    want = gradients(keys, torch.float64, "gather")
    scaled = gradients(keys, torch.float32, impl, scale=1.01 * SCALE)
    assert min(rel_rms(g, w) for g, w in zip(scaled, want, strict=True)) > 10 * GRAD_BUDGET
    less = gradients(fewer, torch.float32, impl)
    assert min(rel_rms(g, w) for g, w in zip(less, want, strict=True)) > BFLOAT16_GRAD_BUDGET
