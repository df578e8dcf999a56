"""Counting of loads, the bias that evens them out, and the auxiliary loss against its formula in loops."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from glm5.config.presets import preset
from glm5.model.moe import Router
from glm5.testing.numerics import rel_rms
from glm5.train.balance import Balance, sequence_loss

EXACT = 1e-12  # float64, the same sums in another order
T, LENGTHS = 12, [5, 1, 6]


@pytest.fixture
def gen(seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def model(gen) -> torch.nn.Module:
    cfg = preset("tiny")
    model = torch.nn.ModuleList([Router(cfg), Router(cfg)]).double()
    with torch.no_grad():
        for router in model:
            router.weight.normal_(generator=gen)
    return model


def rows(lengths: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def tokens(model, gen, num: int = T) -> torch.Tensor:
    return torch.randn(num, model[0].weight.shape[1], generator=gen, dtype=torch.float64)


def naive(x: torch.Tensor, weight: torch.Tensor, lengths: list[int], top: int) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for part in x.split(lengths):
        p = (part @ weight.T).sigmoid()
        num_experts, length = len(weight), len(part)
        for e in range(num_experts):
            hits = sum(int(e in row.topk(top).indices.tolist()) for row in p)
            share = sum(row[e] / row.sum() for row in p) / length
            total = total + length * (num_experts / (top * length) * hits) * share
    return total


def test_sequence_loss_is_the_formula(model, gen):
    x, weight = tokens(model, gen), model[0].weight
    got = sequence_loss(x, weight, rows(LENGTHS), 2)
    want = naive(x, weight, LENGTHS, 2)
    assert rel_rms(got, want) < EXACT
    assert rel_rms(sequence_loss(x, weight, rows([6, 6]), 2), want) > 1e-4  # whose tokens are whose does count
    grads = [torch.autograd.grad(one, weight)[0] for one in (got, want)]
    assert rel_rms(*grads) < EXACT


def test_packed_sequences_sum_to_each_alone_and_an_even_load_costs_one_a_token(model, gen):
    x, weight = tokens(model, gen), model[0].weight
    alone = sum(sequence_loss(part, weight, rows([len(part)]), 2) for part in x.split(LENGTHS))
    assert rel_rms(sequence_loss(x, weight, rows(LENGTHS), 2), alone) < EXACT
    assert sequence_loss(x, weight, rows(LENGTHS), len(weight)).item() == pytest.approx(T)


@pytest.mark.parametrize("again", [False, True])
def test_loads_are_counted_once_though_activations_are_computed_again(model, gen, again):
    balance, x = Balance(model), tokens(model, gen).requires_grad_()

    def passes(x):
        return sum(router(x)[0].sum() for router in model)

    with balance.record(rows(LENGTHS), with_loss=True):
        out = checkpoint(passes, x, use_reentrant=False) if again else passes(x)
        losses = balance.losses()
        assert len(losses) == 2
        (out + torch.stack(losses).sum()).backward()
        assert not balance.losses()
    for router, load in zip(model, balance.loads.values(), strict=True):
        chosen = router(x)[1]
        assert torch.equal(load, torch.bincount(chosen.flatten(), minlength=len(load)))
        want = torch.autograd.grad(
            sequence_loss(x, router.weight, rows(LENGTHS), 2) + router(x)[0].sum(), router.weight
        )
        assert rel_rms(router.weight.grad, want[0]) < EXACT


def test_the_bias_moves_towards_an_even_load(model, gen):
    x, balance = tokens(model, gen, 400) + 0.3, Balance(model)

    def excess(step: float) -> float:
        with balance.record(rows([400]), with_loss=False):
            for router in model:
                router(x)
        worst = max(balance.excess().values())
        balance.update(step)
        return worst.item()

    first = excess(0.0)
    assert all(not router.e_score_correction_bias.any() for router in model)
    for _ in range(300):
        last = excess(0.004)
    print(f"fullest expert over the mean: {first:.2f} before, {last:.2f} after")
    assert last < 0.4 * first
    for router in model:
        assert router.e_score_correction_bias.sum().abs() < 1e-4
    biases = [router.e_score_correction_bias.clone() for router in model]
    assert not balance.excess()  # nothing was seen since
    balance.update(0.01)
    assert all(torch.equal(router.e_score_correction_bias, bias) for router, bias in zip(model, biases, strict=True))


def test_loads_of_other_ranks_are_added(model, gen):
    x, balance = tokens(model, gen), Balance(model)
    with balance.record(rows([T]), with_loss=False):
        model[0](x)
    seen = []
    balance.update(0.01, reduce=lambda load: seen.append(load) or load * 0)
    assert seen[0].sum() == T * 2
    assert not model[0].e_score_correction_bias.any()
