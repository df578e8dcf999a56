"""router against a float64 loop over tokens; ties and groups by hand."""

import numpy as np
import pytest
import torch

from glm5.kernels.router import router
from glm5.testing.numerics import rel_rms

# Inputs are rounded before both runs, all arithmetic is float32 or better. Measured: float64 1.2e-16, others 8e-8.
BUDGET = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}
# (experts, top_k, n_group, topk_group)
SHAPES = [(2, 1, 1, 1), (8, 2, 1, 1), (8, 8, 1, 1), (12, 3, 3, 2), (16, 4, 4, 1), (16, 4, 8, 2), (64, 8, 1, 1)]
MIN_GAP = 1e-6  # scores closer than this may be ordered otherwise in float32; such tokens are left out and counted


def make_case(T, E, gen, dtype=torch.float64, D=24):
    x, weight = torch.randn(T, D, generator=gen).to(dtype), (torch.randn(E, D, generator=gen) * 0.3).to(dtype)
    return x, weight, torch.randn(E, generator=gen) * 0.1


def options(top_k=2, n_group=1, topk_group=1, norm_topk_prob=True, scaling_factor=2.5) -> dict:
    return {
        "top_k": top_k,
        "n_group": n_group,
        "topk_group": topk_group,
        "norm_topk_prob": norm_topk_prob,
        "scaling_factor": scaling_factor,
    }


def best(values, k: int) -> list[int]:
    return sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


def oracle(x, weight, bias, *, top_k, n_group, topk_group, norm_topk_prob, scaling_factor):
    """Weights, experts, and how far the nearest loser was from being chosen, per token."""
    weights, experts, gaps = [], [], []
    for row in x.double().numpy():
        p = 1 / (1 + np.exp(-weight.double().numpy() @ row))
        choice = p + bias.double().numpy()
        groups = choice.reshape(n_group, -1)
        goodness = np.sort(groups, axis=1)[:, -2:].sum(1)
        allowed = np.isin(np.arange(n_group), best(goodness, topk_group)).repeat(groups.shape[1])
        choice = np.where(allowed, choice, -np.inf)
        chosen = best(choice, top_k)
        ranked, grades = np.sort(choice)[::-1], np.sort(goodness)[::-1]
        gap_experts = ranked[top_k - 1] - ranked[top_k] if top_k < len(ranked) else np.inf
        gap_groups = grades[topk_group - 1] - grades[topk_group] if topk_group < n_group else np.inf
        gaps.append(min(gap_experts, gap_groups))
        w = p[chosen]
        weights.append((w / (w.sum() + 1e-20) if norm_topk_prob else w) * scaling_factor)
        experts.append(chosen)
    return torch.tensor(np.array(weights)), torch.tensor(experts, dtype=torch.int32), torch.tensor(gaps)


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize(("E", "top_k", "n_group", "topk_group"), SHAPES)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("impl", ["reference", "invariant"])
def test_agrees_with_float64(impl, E, top_k, n_group, topk_group, norm_topk_prob, dtype, gen):
    x, weight, bias = make_case(40, E, gen, dtype)
    opts = options(top_k, n_group, topk_group, norm_topk_prob)
    weight_TA, expert_TA = router(x, weight, bias, **opts, impl=impl)
    want_weight, want_expert, gap = oracle(x, weight, bias, **opts)
    sure = gap > MIN_GAP
    assert sure.sum() >= 38
    assert weight_TA.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert expert_TA.dtype == torch.int32
    assert torch.equal(expert_TA[sure], want_expert[sure])
    assert rel_rms(weight_TA[sure], want_weight[sure]) < BUDGET[dtype]


def test_budget_notices_bias_in_the_weights(gen):
    x, weight, bias = make_case(40, 8, gen, torch.float32)
    weight_TA, expert_TA = router(x, weight, bias, **options(norm_topk_prob=False))
    biased = weight_TA + 2.5 * bias[expert_TA.long()]
    assert rel_rms(biased, oracle(x, weight, bias, **options(norm_topk_prob=False))[0]) > 10 * BUDGET[torch.float32]


@pytest.mark.parametrize("T", [0, 1])
def test_few_tokens(T, gen):
    weight_TA, expert_TA = router(*make_case(T, 8, gen), **options())
    assert weight_TA.shape == expert_TA.shape == (T, 2)


def test_ties_go_to_the_smaller_index():
    x, weight = torch.ones(1, 4), torch.zeros(8, 4)
    chosen = lambda bias, **opts: router(x, weight, torch.tensor(bias), **options(**opts))[1][0].tolist()  # noqa: E731
    assert chosen([0.0] * 8) == [0, 1]
    assert chosen([0.0, 0, 0, 1, 0, 0, 1, 1]) == [3, 6]
    # Groups (0-1), (2-3), (4-5), (6-7): the last three are equally good, so the earlier two of them are taken.
    assert chosen([0.0, 0, 1, 0, 1, 0, 1, 0], n_group=4, topk_group=2, top_k=4) == [2, 3, 4, 5]


def test_a_group_is_as_good_as_its_two_best():
    x, weight = torch.ones(1, 4), torch.zeros(6, 4)
    bias = torch.tensor([0.9, 0.0, 0.0, 0.5, 0.5, 0.0])  # best single in the first group, best pair in the second
    assert router(x, weight, bias, **options(n_group=2))[1][0].tolist() == [3, 4]


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_gradients(norm_topk_prob, gen):
    x, weight, bias = make_case(5, 6, gen, D=4)
    inputs = (x.requires_grad_(), weight.requires_grad_())
    opts = options(norm_topk_prob=norm_topk_prob)
    assert torch.autograd.gradcheck(lambda x, w: router(x, w, bias, **opts)[0], inputs)


@pytest.mark.parametrize(
    ("E", "opts", "message"),
    [
        (8, options(n_group=3), "got 8 experts, n_group=3"),
        (8, options(n_group=8, topk_group=8), "groups of at least 2"),
        (8, options(n_group=2, topk_group=3), "topk_group=3"),
        (8, options(top_k=5, n_group=2), "1 groups of 4 experts allow 1 to 4"),
        (8, options(top_k=0), "got top_k=0"),
    ],
)
def test_errors(E, opts, message, gen):
    with pytest.raises(ValueError, match=message):
        router(*make_case(2, E, gen), **opts)


def test_unknown_implementation(gen):
    with pytest.raises(ValueError, match="router: unknown impl 'fast'"):
        router(*make_case(2, 4, gen), **options(), impl="fast")


@pytest.mark.parametrize("num_tokens", [256, 512, 1024, 2048])
def test_any_share_of_a_prompt_fills_a_gpu(num_tokens):
    cut = pytest.importorskip("glm5.kernels.router.triton").tiling_for(num_tokens)
    assert -(-num_tokens // cut.block_t) * (256 // cut.block_e) * cut.split >= 128
