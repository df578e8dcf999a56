"""`invariant` implementations: a row's result is its own, bit for bit; and what that rests on holds on this machine."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.config.presets import preset
from glm5.kernels import invariant
from glm5.kernels.grouped_experts import grouped_experts
from glm5.kernels.invariant import PASS_ROWS
from glm5.kernels.top_k import top_k
from tests.support.arranged_keys import Paged

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Relative difference of two values that are a few units in the last place apart.
LAST_PLACES = {torch.float32: 5e-7, torch.bfloat16: 8e-3, torch.float64: 1e-15}


def shuffled(gen: torch.Generator, count: int = PASS_ROWS) -> Tensor:
    return torch.randperm(count, generator=gen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_score_is_of_its_query_and_key(dtype, gen):
    case = Paged(gen, dtype)
    want = case.scores(torch.arange(PASS_ROWS), "invariant")
    for _ in range(4):
        assert torch.equal(case.scores(shuffled(gen), "invariant"), want)
    some = shuffled(gen)[:7]
    whole = case.scores(some, "invariant")
    assert torch.equal(whole, want[some.sort().values])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_of_its_query_and_keys(dtype, gen):
    case = Paged(gen, dtype)
    keys = top_k(case.scores(torch.arange(PASS_ROWS), "invariant"), case.sizes.K)
    want = case.attention(keys, torch.arange(PASS_ROWS), "invariant")
    for _ in range(4):
        got = case.attention(keys, shuffled(gen), "invariant")
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_of_a_row_are_its_own(dtype, gen):
    """Of rows in any number, of which many or few share an expert."""
    D, ffn, E, A = 20, 12, 6, 3
    x, gate_up, down = (torch.randn(*s, generator=gen).to(dtype) for s in [(70, D), (E, 2 * ffn, D), (E, D, ffn)])
    weight = torch.rand(70, A, generator=gen)
    expert = torch.stack([torch.randperm(E, generator=gen)[:A] for _ in range(70)]).int()
    want = grouped_experts(x, gate_up, down, weight, expert, impl="invariant")
    for count in (1, 2, 8, 9, 31, 70):
        some = shuffled(gen, 70)[:count]
        got = grouped_experts(x[some], gate_up, down, weight[some], expert[some], impl="invariant")
        assert torch.equal(got, want[some])


def test_the_usual_implementations_do_show_their_batch(gen):
    """The control: how many results change when the queries are shuffled, or fewer."""
    case, every = Paged(gen, torch.float32), torch.arange(PASS_ROWS)
    keys = top_k(case.scores(every, "auto"), case.sizes.K)
    out, other = (case.attention(keys, order, "masked")[0] for order in (every, shuffled(gen)))
    x, gate_up, down = (torch.randn(*s, generator=gen) for s in [(70, 20), (6, 24, 20), (6, 20, 12)])
    weight, expert = torch.rand(70, 1, generator=gen), torch.randint(6, (70, 1), generator=gen).int()
    whole = grouped_experts(x, gate_up, down, weight, expert)
    rows = ((t[i : i + 1] for t in (x, weight, expert)) for i in range(70))
    alone = torch.cat([grouped_experts(one, gate_up, down, w, e) for one, w, e in rows])
    case.q_TJI, case.w_TJ = case.q_TJI[:, :1], case.w_TJ[:, :1]  # with several heads, MKL happens to compute alike
    scores = case.scores(every, "auto")
    lone_scores = torch.cat([case.scores(every[i : i + 1], "auto") for i in range(PASS_ROWS)])
    counts = [int((a != b).sum()) for a, b in [(scores, lone_scores), (out, other), (whole, alone)]]
    print("scores, attention, experts that differ:", counts)
    assert any(counts), "which of them do differs from processor to processor"


@pytest.mark.parametrize("name", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_is_its_own(name, dtype, gen):
    ours, torchs = getattr(invariant, name), getattr(F, name)
    x = (torch.randn(5000, generator=gen) * 3).to(dtype)
    want = ours(x)
    pieces = [(first, first + n) for first in range(0, 40, 3) for n in (1, 5, 17, 33, 63, 100)]
    assert all(torch.equal(ours(x[a:b]), want[a:b]) for a, b in pieces)
    assert torch.equal(ours(x[::3]), want[::3])
    assert torch.allclose(want, torchs(x), rtol=LAST_PLACES[dtype], atol=0)
    if dtype == torch.float32:
        assert not all(torch.equal(last_ones_apart(ours, x[a:b]), want[a:b]) for a, b in pieces)


def last_ones_apart(function, x: Tensor) -> Tensor:
    """The control: what is no whole vector of 16 is computed in another way, as torch does on most processors."""
    whole = len(x) // 16 * 16
    return torch.cat([function(x[:whole]), function(x[whole:].double()).float()])


def widths() -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of tiny and nano, some of GLM-5's, and odd ones."""
    found = {(12, 36), (260, 8), (2048, 6144), (6144, 576), (6144, 32)}
    for cfg in (preset("tiny"), preset("nano")):
        D, heads = cfg.hidden_size, cfg.num_attention_heads
        found |= {(D, cfg.q_lora_rank), (cfg.q_lora_rank, heads * cfg.qk_head_dim), (D, cfg.index_head_dim)}
        found |= {(D, cfg.kv_lora_rank + cfg.qk_rope_head_dim), (heads * cfg.v_head_dim, D), (D, cfg.vocab_size)}
        found |= {(D, cfg.n_routed_experts), (D, cfg.intermediate_size), (cfg.intermediate_size, D), (2 * D, D)}
    return sorted(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_matmul_of_one_shape_computes_its_rows_alike(dtype, gen):
    """One row at every position of a pass, which is an expert's tile too."""
    for inputs, outputs in widths():
        weight = torch.randn(outputs, inputs, generator=gen).to(dtype)
        x = torch.randn(PASS_ROWS, inputs, generator=gen).to(dtype)
        alike = F.linear(x[:1].expand(PASS_ROWS, -1).contiguous(), weight)
        assert (alike == alike[0]).all(), f"{inputs=} {outputs=}"
        assert torch.equal(F.linear(x, weight)[0], alike[0]), f"{inputs=} {outputs=}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_works_on_rows_does_so_in_any_number(dtype, gen):
    """Norms, sums and softmax: what a row's are does not depend on how many there are."""
    ops = [lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x.sum(-1), lambda x: x.pow(2).mean(-1)]
    ops.append(lambda x: F.layer_norm(x, x.shape[-1:]))
    for width in (1, 2, 3, 7, 12, 20, 31, 32, 50, 64, 128, 320, 1000, 6144):
        x = (torch.randn(70, width, generator=gen) * 3).to(dtype)
        for op in ops:
            want = op(x)
            assert all(torch.equal(op(x[a : a + n]), want[a : a + n]) for a, n in [(0, 1), (5, 2), (3, 7), (1, 33)])


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_top_k_does_not_see_columns_that_nobody_sees_nor_other_rows(impl, gen):
    """Scores with many ties, in tables of several widths."""
    score = torch.randn(PASS_ROWS, 100, generator=gen).mul(2).round()
    score[torch.rand(score.shape, generator=gen) < 0.2] = float("-inf")
    for k in (1, 8, 99, 100, 130):
        want = top_k(score, k, impl=impl)
        for width in (101, 128, 640):
            wide = F.pad(score, (0, width - 100), value=float("-inf"))
            order = shuffled(gen)[:9]
            assert torch.equal(top_k(wide[order], k, impl=impl), want[order])
