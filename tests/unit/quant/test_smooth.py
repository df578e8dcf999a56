"""Smoothing: nothing changes without rounding; searches by their formulas; upstream's faults and what they cost."""

import math

import pytest
import torch
from torch import Tensor

from glm5.model.glm5 import Glm5
from glm5.quant import smooth as module
from glm5.quant.fuse import smooth
from glm5.quant.graph import ROTATIONS, SUBGRAPHS, place
from glm5.quant.minmax import fake_quantize
from glm5.quant.record import INT8_TOKEN, W4A8, W8A8, Scheme
from glm5.quant.rotate import fold, mtp_corrections, rotate, rotations
from glm5.quant.smooth import EXPONENTS, Target, flex_awq, flex_smooth
from glm5.quant.ssz import ssz_upstream
from tests.support.models import random_model
from tests.support.saying import said, worst
from tests.support.stacks import stacked_by_name, with_tensors
from tests.support.weights import bursty, laplace

UNCHANGED = 1e-9  # in float64, as for rotations; measured 2.1e-15


@pytest.fixture(scope="module")
def model() -> Glm5:
    return random_model(3, dtype=torch.float64)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(320, (40,), generator=torch.Generator().manual_seed(5))


def smoothed(model: Glm5, tensors: dict[str, Tensor], subgraphs, gen: torch.Generator) -> Glm5:
    """Every layer, by random scales."""
    for layer in range(model.cfg.num_layers_with_mtp):
        of_layer = {n: t for n, t in tensors.items() if place(n)[0] == f"model.layers.{layer}."}
        for subgraph in subgraphs:
            readers = [t for n, t in of_layer.items() if place(n)[1] in subgraph.targets]
            if readers:
                shape = (*readers[0].shape[:-2], readers[0].shape[-1])
                scale = torch.exp(torch.randn(shape, generator=gen, dtype=torch.float64))
                of_layer |= smooth(of_layer, model.cfg, subgraph, scale)[0]
        tensors = {**tensors, **of_layer}
    return with_tensors(model, tensors)


@pytest.mark.parametrize("subgraphs", [*((s,) for s in SUBGRAPHS), SUBGRAPHS], ids=lambda s: s[0].source)
def test_nothing_that_the_model_says_changes(subgraphs, model, ids, seed):
    other = smoothed(model, stacked_by_name(model), subgraphs, torch.Generator().manual_seed(seed))
    assert worst(said(other, ids), said(model, ids)) < UNCHANGED


def test_nor_after_folding_and_rotating(model, ids, seed):
    tensors, names = stacked_by_name(model), tuple(ROTATIONS)
    by = rotations(model.cfg, names)
    mtp_norm = tensors["model.layers.4.shared_head.norm.weight"]
    corrections = mtp_corrections(by["residual"], tensors["model.norm.weight"], mtp_norm, tensors["lm_head.weight"])
    tensors |= fold(tensors, names)[0]
    tensors |= rotate(tensors, model.cfg, by)[0]
    other = smoothed(model, tensors, SUBGRAPHS, torch.Generator().manual_seed(seed))
    assert worst(said(other, ids, corrections), said(model, ids)) < UNCHANGED


def test_a_norm_in_bfloat16_loses_nothing_that_its_readers_do_not_win_back(model, seed):
    layer = {n: t for n, t in stacked_by_name(model).items() if n.startswith("model.layers.1.")}
    norm = "model.layers.1.input_layernorm.weight"
    layer[norm] = layer[norm].bfloat16()
    subgraph = next(s for s in SUBGRAPHS if s.source == "input_layernorm")
    scale = torch.exp(torch.randn(64, generator=torch.Generator().manual_seed(seed))).double()
    changed, steps = smooth(layer, model.cfg, subgraph, scale)
    reader = "model.layers.1.self_attn.q_a_proj.weight"
    before, after = (t[reader] * t[norm].double() for t in (layer, changed))
    assert changed[norm].dtype == torch.bfloat16
    assert torch.allclose(before, after, rtol=1e-6, atol=0)
    assert set(steps) == set(changed)


def error(x: Tensor, weight: Tensor, scale: Tensor, scheme: Scheme, scale_of_weight=None) -> Tensor:
    """E by its formula."""
    want = x @ weight.mT
    moved = weight * scale
    rounded = fake_quantize(moved, scheme.weight, None if scale_of_weight is None else scale_of_weight(moved))
    return (fake_quantize(x / scale, scheme.act) @ rounded.mT - want).norm() / want.norm()


def test_upstreams_two_stages_by_their_formula(seed):
    gen = torch.Generator().manual_seed(seed)
    x, weight = bursty(gen, 30, 48).double(), laplace(gen, 20, 48).double()
    a, w = x.abs().amax(0), weight.abs().amax(0)
    eight = Scheme(INT8_TOKEN, INT8_TOKEN)
    best = (math.inf, 0.0, 0.0)
    for alpha in EXPONENTS:
        best = min(best, (error(x, weight, a**alpha / w ** (1 - alpha), eight).item(), alpha, 1 - alpha))
    for beta in EXPONENTS:
        best = min(best, (error(x, weight, a ** best[1] / w**beta, eight).item(), best[1], beta))
    got = flex_smooth(x, [Target(weight[:12], W4A8), Target(weight[12:], W8A8)], upstream=True)
    assert (got.alpha.item(), got.beta.item()) == pytest.approx(best[1:])
    assert got.error.item() == pytest.approx(best[0], rel=1e-9)
    assert torch.allclose(got.scale, (a ** best[1] / w ** best[2]).clamp_min(1e-5), rtol=1e-12)


def test_upstreams_awq_scores_one_size_and_applies_another(seed):
    gen = torch.Generator().manual_seed(seed)
    x, weight = bursty(gen, 30, 48).double(), laplace(gen, 20, 48).double()

    def upstreams(scale):
        want, moved = x @ weight.T, weight * scale
        rounded = fake_quantize(moved, W4A8.weight, ssz_upstream(moved, W4A8.weight, 10))
        return (fake_quantize((x / scale).T.contiguous(), INT8_TOKEN).T @ rounded.T - want).norm() / want.norm()

    scores = [upstreams((x.abs().amax(0) ** alpha).clamp_min(1e-5)).item() for alpha in EXPONENTS]
    got = flex_awq(x, [Target(weight, W4A8)], upstream=True)
    assert got.error.item() == pytest.approx(min(scores), rel=1e-9)
    assert got.alpha.item() == EXPONENTS[scores.index(min(scores))]
    assert torch.allclose(got.scale, x.abs().mean(0) ** got.alpha)
    given = flex_awq(x, [Target(weight, W4A8)], alpha=0.35, upstream=True)
    assert given.alpha.item() == pytest.approx(0.35)
    assert given.error.item() == pytest.approx(scores[7], rel=1e-9)


@pytest.mark.parametrize("run", [flex_smooth, flex_awq], ids=["smooth", "awq"])
def test_ours_applies_what_it_scored_and_never_does_harm(run, seed):
    gen = torch.Generator().manual_seed(seed)
    for scheme in (W8A8, W4A8):
        x, weight = bursty(gen, 4, 64, 64).double(), laplace(gen, 4, 32, 64).double()
        got = run(x, [Target(weight, scheme)], round_weight=fake_quantize)
        for e in range(4):
            assert error(x[e], weight[e], got.scale[e], scheme).item() == pytest.approx(got.error[e].item(), rel=1e-9)
            assert error(x[e], weight[e], torch.ones(64), scheme).item() == pytest.approx(got.error_before[e].item())
        assert (got.error <= got.error_before).all()
        assert torch.allclose(got.scale.log().mean(-1), torch.zeros(4).double(), atol=1e-9)


def test_outlier_channels_are_what_it_is_for(seed):
    gen = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(128, 256, generator=gen), torch.randn(64, 256, generator=gen)
    x[:, [7, 90]] *= 300
    weight[:, [7, 90]] /= 300
    got = flex_smooth(x, [Target(weight, W8A8)])
    assert got.error < 0.1 * got.error_before


@pytest.mark.parametrize("run", [flex_smooth, flex_awq], ids=["smooth", "awq"])
@pytest.mark.parametrize("upstream", [False, True])
def test_a_batch_of_experts_is_a_loop_bit_for_bit(run, upstream, seed, monkeypatch):
    """With as many tokens each as they have, and zeros up to the most."""
    gen = torch.Generator().manual_seed(seed)
    x, weight = bursty(gen, 6, 32, 64).double(), laplace(gen, 6, 24, 64).double()
    counts = torch.tensor([32, 5, 17, 0, 1, 31])
    x *= torch.arange(32)[:, None] < counts[:, None, None]
    more = {"counts": counts} if run is flex_awq else {}
    whole = run(x, [Target(weight, W4A8)], upstream=upstream, **more)
    for e, count in enumerate(counts.tolist()):
        some = {name: value[e] for name, value in more.items()}
        alone = run(x[e], [Target(weight[e], W4A8)], upstream=upstream, **some)
        assert all(torch.equal(a[e], b) for a, b in zip(whole, alone, strict=True))
        if count:
            cut = run(x[e, :count], [Target(weight[e], W4A8)], upstream=upstream, **some)
            assert torch.allclose(cut.scale, alone.scale, rtol=1e-9)
    monkeypatch.setitem(module._MAX_ELEMENTS, "cpu", 1 << 13)
    some_at_a_time = run(x, [Target(weight, W4A8)], upstream=upstream, **more)
    assert all(torch.equal(a, b) for a, b in zip(whole, some_at_a_time, strict=True))
    assert torch.equal(whole.scale[3], torch.ones(64).double())
    assert whole.error[3] == 0


def test_shared_scales_serve_all_experts(seed):
    gen = torch.Generator().manual_seed(seed)
    x, weight = bursty(gen, 5, 40, 64).double(), laplace(gen, 5, 24, 64).double()
    got = flex_smooth(x, [Target(weight, W8A8)], shared=True)
    assert got.scale.shape == (64,)
    want = x @ weight.mT
    wrong = fake_quantize(x / got.scale, INT8_TOKEN) @ fake_quantize(weight * got.scale, W8A8.weight).mT - want
    assert (wrong.norm() / want.norm()).item() == pytest.approx(got.error.item(), rel=1e-9)


def test_a_stack_behind_tokens_of_no_batch_is_one_matrix(seed):
    """As experts' gate and up behind post_attention_layernorm; the router beside them is only carried."""
    gen = torch.Generator().manual_seed(seed)
    x, weight = bursty(gen, 40, 64), laplace(gen, 5, 24, 64)
    for upstream in (False, True):
        stacked = flex_smooth(
            x, [Target(weight, W4A8), Target(weight[0], None)][: 1 if upstream else 2], upstream=upstream
        )
        flat = flex_smooth(x, [Target(weight.flatten(0, 1), W4A8)], upstream=upstream)
        assert stacked.scale.shape == (64,)
        assert all(torch.equal(a, b) for a, b in zip(stacked, flat, strict=True))


def test_channels_that_no_token_used_stay_as_they_are(seed):
    gen = torch.Generator().manual_seed(seed)
    x, weight = bursty(gen, 40, 64), laplace(gen, 24, 64)
    x[:, 11] = 0
    weight[:, 12] = 0
    ours = flex_smooth(x, [Target(weight, W8A8)]).scale
    assert ours[11] == 1
    assert ours.isfinite().all()
    assert flex_awq(x, [Target(weight, W4A8)], upstream=True).scale[11] == pytest.approx(1e-5)


def test_nor_do_they_follow_their_columns_without_a_share_of_the_inputs(seed):
    gen = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(40, 64, generator=gen), torch.randn(24, 64, generator=gen)
    x[:, 11] = 0
    weight[:, 7] *= 300
    found = flex_smooth(x, [Target(weight, W8A8)], alpha=0.0)
    assert (found.alpha, found.beta) != (0, 0)
    assert found.scale[7] < 0.1
    assert found.scale[11] == 1
    assert found.scale.log().sum().item() == pytest.approx(0, abs=1e-4)


def test_given_exponents_are_not_searched(seed):
    gen = torch.Generator().manual_seed(seed)
    x, weight = bursty(gen, 40, 64).double(), laplace(gen, 24, 64).double()
    got = flex_smooth(x, [Target(weight, W8A8)], alpha=0.9, upstream=True)
    want = x.abs().amax(0) ** 0.9 / weight.abs().amax(0) ** (1 - 0.9)
    assert torch.allclose(got.scale, want)
