"""Deterministic mode at GLM-5's widths: a row's result is, bit for bit, the same alone and among others.

Kernels first, at the rows of a pass or fewer; then a model whose rows are arranged anew in every pass.
"""

import pytest
import torch
from torch.nn import functional as F

from glm5.checkpoint.dummy import dummy
from glm5.config.presets import preset
from glm5.engine.runner.forward.passes import Passes
from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.kernels.block_scaled import quantize_blocks
from glm5.kernels.fp8_linear import fp8_linear
from glm5.kernels.grouped_experts import SharedExpert, grouped_experts
from glm5.kernels.invariant import pass_rows
from glm5.kernels.mla_queries import mla_queries
from glm5.kernels.router import router
from glm5.kernels.row_linear import row_linear
from glm5.model.lowering import use_invariant
from tests.support.arranged_keys import Paged, Sizes
from tests.support.arranged_rows import in_turn, make_ids, mixed
from tests.support.experts import make_experts, plain

pytestmark = pytest.mark.gpu

GLM5 = Sizes(J=32, I=128, H=64, C=512, R=64, K=2048, pages=40)
LAYERS, EXPERTS, TOP_K, VOCAB, MAX_LEN = 4, 16, 128, 19360, 512
ROWS = pass_rows(torch.device("cuda"))
# (inputs, outputs) of products with a pass's rows.
FP8_PRODUCTS = [(6144, 2048), (6144, 2624), (2048, 16384), (2048, 20480), (16384, 6144), (6144, 24576), (12288, 6144)]
PLAIN_PRODUCTS = [(6144, 32), (6144, 128), (6144, 19360)]


@pytest.fixture
def gen(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("layout", ["plain", "fp8"])
def test_keys_and_attention_are_of_a_query_alone(layout, gen):
    case = Paged(gen, torch.bfloat16, GLM5, device="cuda", layout=layout, num_queries=ROWS)
    every = torch.arange(case.num_queries)
    keys = case.selection(every, "invariant_triton")
    want = case.attention(keys, every, "invariant_triton")
    for count in (case.num_queries, 7, 1):
        some = case.shuffled(count)
        order = some.argsort()
        assert torch.equal(case.selection(some, "invariant_triton"), keys[some[order]])
        for got, whole in zip(case.attention(keys, some, "invariant_triton"), want, strict=True):
            assert torch.equal(got, whole[some[order]])


def test_a_router_sees_one_row(gen):
    x, weight = (torch.randn(n, 6144, generator=gen).bfloat16().cuda() for n in (ROWS, 256))
    how = {"top_k": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scaling_factor": 2.5}
    bias = torch.randn(256, generator=gen).cuda()
    want = router(x, weight * 6144**-0.5, bias, impl="invariant_triton", **how)
    for _ in range(5):
        order = torch.randperm(len(x), generator=gen).cuda()
        for got, whole in zip(
            router(x[order], weight * 6144**-0.5, bias, impl="invariant_triton", **how), want, strict=True
        ):
            assert torch.equal(got, whole[order])


def test_experts_of_a_row_are_its_own(gen):
    case = make_experts(ROWS, 8, 4, 6144, 2048, gen).to("cuda", torch.bfloat16)

    def run(rows):
        chosen = case.x[rows], case.gate_up, case.down, case.weight[rows], case.expert[rows]
        return grouped_experts(*chosen, shared=case.shared, impl="invariant_triton")

    want = run(torch.arange(ROWS).cuda())
    for count in (1, 9, ROWS):
        some = torch.randperm(ROWS, generator=gen)[:count].cuda()
        assert torch.equal(run(some), want[some])


@pytest.mark.parametrize("sizes", [(256, 128, 16, 4), (6144, 2048, 8, 4)], ids=["mini", "GLM-5"])
def test_plain_weights_give_a_row_the_same_bits_among_any_number(sizes, gen):
    """What an exact training pass rests on: rows of a pass and those of a whole batch."""
    width, ffn, num_experts, num_chosen = sizes
    count = 3000
    case = plain(make_experts(count, num_experts, num_chosen, width, ffn, gen), torch.bfloat16)
    x, weight, expert = case.x.cuda(), case.weight.cuda(), case.expert.cuda()
    stacks, shared = (case.gate_up.cuda(), case.down.cuda()), SharedExpert(*(each.cuda() for each in case.shared))
    gate = torch.randn(num_experts, width, generator=gen).bfloat16().cuda() * width**-0.5
    bias = torch.zeros(num_experts, device="cuda")
    how = {"top_k": num_chosen, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scaling_factor": 2.5}
    q, w = (torch.randn(*shape, generator=gen).bfloat16().cuda() for shape in ((count, 8, 64), (8, 32, 128)))
    cos, sin = (torch.randn(count, 16, generator=gen).bfloat16().cuda() for _ in range(2))

    def run(rows):
        chosen = x[rows], *stacks, weight[rows], expert[rows]
        return (
            row_linear(x[rows], shared.gate),
            grouped_experts(*chosen, shared=shared, impl="invariant_triton"),
            *router(x[rows], gate, bias, impl="invariant_triton", **how),
            mla_queries(q[rows], w, cos[rows], sin[rows], impl="invariant_triton"),
        )

    want = run(torch.arange(count).cuda())
    for num in (1, ROWS, 1000):
        some = torch.randperm(count, generator=gen)[:num].cuda()
        for got, whole in zip(run(some), want, strict=True):
            assert torch.equal(got, whole[some])


@pytest.mark.parametrize("kind", ["fp8", "plain"])
def test_products_compute_the_rows_of_a_pass_alike(kind, gen):
    for inputs, outputs in FP8_PRODUCTS if kind == "fp8" else PLAIN_PRODUCTS:
        dense = torch.randn(outputs, inputs, device="cuda") * inputs**-0.5
        weight = quantize_blocks(dense) if kind == "fp8" else dense.bfloat16()
        x = torch.randn(ROWS, inputs, generator=gen).bfloat16().cuda()

        def run(x, weight=weight):
            return fp8_linear(x, weight) if kind == "fp8" else F.linear(x, weight)

        want = run(x)
        alike = run(x[:1].expand(len(x), -1).contiguous())
        assert (alike == want[0]).all(), f"{inputs=} {outputs=}"
        for _ in range(3):
            order = torch.randperm(len(x), generator=gen).cuda()
            assert torch.equal(run(x[order]), want[order]), f"{inputs=} {outputs=}"


@pytest.fixture(scope="module")
def model():
    cfg = preset("glm-5", LAYERS).replace(
        n_routed_experts=EXPERTS,
        index_topk=TOP_K,
        vocab_size=VOCAB,
        eos_token_id=[1],
        pad_token_id=0,
    )
    return dummy(cfg, fp8=True, device="cuda", seed=1)


@torch.inference_mode()
def test_the_usual_steps_do_show_their_batch(model, rng):
    """The control, before the model is made invariant."""
    passes, ids = Passes(model, None, FusedModel(model, MAX_LEN)), make_ids(model.cfg, rng)
    want = in_turn(passes, ids, rng, invariant=False)
    assert mixed(passes, ids, rng, invariant=False).num_unlike(want) > 0


@pytest.mark.parametrize("layout", ["auto", "fp8"])
@torch.inference_mode()
def test_a_row_is_the_same_in_any_pass(model, layout, rng):
    use_invariant(model)
    passes, ids = Passes(model, ROWS, FusedModel(model, MAX_LEN)), make_ids(model.cfg, rng)
    want = in_turn(passes, ids, rng, layout=layout)
    for _ in range(2):
        assert mixed(passes, ids, rng, layout=layout).num_unlike(want) == 0
