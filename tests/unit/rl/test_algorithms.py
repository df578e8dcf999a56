"""Each algorithm: values computed by hand, and the gradient of its own formula by autograd in float64."""

import math

import pytest
import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.rl.algorithms import table
from glm5.rl.algorithms.advantages import batch_mean, group_mean, group_mean_std
from glm5.rl.algorithms.ratios import Ratios, binary_kl
from glm5.rl.algorithms.table import PRESETS, Preset, preset_of
from glm5.rl.algorithms.weights import Weights

LENGTHS = [5, 1, 9, 4, 3]
W = 7
EXACT = 1e-12  # float64: a few roundings of values of about one


def tokens(seed: int, spread: float) -> tuple[Tensor, Tensor, Ratios]:
    """(logits [T, W] with a gradient, sampled tokens [T], ratios whose three policies differ by about `spread`)."""
    print(f"{seed=}")
    gen = torch.Generator().manual_seed(seed)
    num = sum(LENGTHS)
    logits = torch.randn(num, W, generator=gen, dtype=torch.float64).requires_grad_()
    target = torch.randint(W, (num, 1), generator=gen)
    current = logits.detach().log_softmax(-1).gather(1, target)[:, 0]
    old, rollout = ((current + spread * torch.randn(num, generator=gen)).clamp_max(-1e-3) for _ in range(2))
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    advantage = torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0], dtype=torch.float64)[sequence]
    return logits, target, Ratios(current, old, rollout, advantage, sequence, len(LENGTHS))


def mean_of_sequences(x: Tensor) -> list[Tensor]:
    return [part.mean() for part in x.split(LENGTHS)]


def each(x: list[Tensor]) -> Tensor:
    return torch.stack(x).repeat_interleave(torch.tensor(LENGTHS))


def ppo(r: Tensor, a: Tensor, low: float = 0.2, high: float = 0.28) -> Tensor:
    return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def gspo(logp: Tensor, of: Ratios) -> Tensor:
    whole = each(mean_of_sequences(logp - of.old_T)).exp().detach()
    return ppo(whole * (logp - logp.detach()).exp(), of.advantage_T, 3e-4, 4e-4)


def icepop(logp: Tensor, of: Ratios) -> Tensor:
    rho = (of.old_T - of.rollout_T).exp()
    pop = torch.where((rho >= 0.5) & (rho <= 2), rho, 0.0)
    return pop * ppo((logp - of.old_T).exp(), of.advantage_T)


def kpop(logp: Tensor, of: Ratios) -> Tensor:
    p, q = of.old_T.exp(), of.rollout_T.exp()
    keep = (divergence(p, q) <= 0.75) & (divergence(q, p) <= 0.75)
    return keep * (p / q) * ppo((logp - of.old_T).exp(), of.advantage_T)


def dis(logp: Tensor, of: Ratios) -> Tensor:
    s = (logp - of.rollout_T).exp().detach()
    return torch.where((s > 0.7) & (s < 6.0), s, 0.0) * of.advantage_T * logp


def dppo(logp: Tensor, of: Ratios) -> Tensor:
    s, a = (logp - of.rollout_T).exp(), of.advantage_T
    moved = (logp.exp() - of.rollout_T.exp()).detach()
    keep = ~(((a > 0) & (moved > 0.2)) | ((a < 0) & (moved < -0.2)))
    return keep * (s * a - 1e-3 * s.log() ** 2)


def flash(logp: Tensor, of: Ratios) -> Tensor:
    drift = each(mean_of_sequences(divergence(of.rollout_T.exp(), logp.exp()))).detach()
    return (drift <= 3e-3) * (logp - of.rollout_T).exp() * of.advantage_T


# What is maximised, token by token; and the spread of ratios at which some tokens are masked and some are not.
FORMULAS = {
    "grpo": (icepop, 0.5),
    "distill": (icepop, 0.5),
    "grpo-no-std": (icepop, 0.5),
    "tis": (lambda logp, of: of.rho.clamp_max(2.0) * ppo((logp - of.old_T).exp(), of.advantage_T), 0.5),
    "kpop": (kpop, 1.2),
    "gspo": (gspo, 6e-3),
    "cispo": (lambda logp, of: (logp - of.old_T).exp().detach().clamp_max(5.0) * of.advantage_T * logp, 1.5),
    "dis": (dis, 0.8),
    "sao": (dis, 0.8),
    "reinforce": (lambda logp, of: of.advantage_T * logp, 0.8),
    "dppo": (dppo, 0.8),
    "flash-reinforce": (flash, 0.25),
}


def mean(each_T: Tensor, reduction: str) -> Tensor:
    if reduction == "token-mean":
        return each_T.mean()
    return torch.stack(mean_of_sequences(each_T)).mean()


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_gradient_is_that_of_the_formula(name, seed):
    formula, spread = FORMULAS[name]
    logits, target, of = tokens(seed, spread)
    preset = PRESETS[name]

    logp = logits.log_softmax(-1).gather(1, target)[:, 0]
    want = torch.autograd.grad(-mean(formula(logp, of), preset.reduction), logits)[0]

    weight, masked = preset.weigh(of)
    logp = logits.log_softmax(-1).gather(1, target)[:, 0]
    got = torch.autograd.grad(-mean(weight * logp, preset.reduction), logits)[0]
    assert (got - want).abs().max() < EXACT
    assert not weight[masked].any()
    assert not got[masked].any()
    assert got[~masked & (of.advantage_T != 0)].abs().amax(dim=1).min() > 0
    if name not in ("cispo", "reinforce"):
        assert 0 < masked.sum() < len(masked)
    if name == "reinforce":
        return
    control = preset.weigh(Ratios(of.current_T, of.old_T + 1, of.rollout_T - 1, *list(vars(of).values())[3:6]))
    assert (control.weight_T - weight).abs().max() > 1e-3


def test_every_preset_has_a_formula_here():
    assert FORMULAS.keys() == PRESETS.keys()


def ratios(current: list[float], old: list[float], rollout: list[float], advantage: list[float]) -> Ratios:
    """Probabilities of tokens of one sequence."""
    logs = [torch.tensor(one, dtype=torch.float64).log() for one in (current, old, rollout)]
    num = len(current)
    return Ratios(*logs, torch.tensor(advantage, dtype=torch.float64), torch.zeros(num, dtype=torch.int64), 1)


def close(got: Weights, weight: list[float], masked: list[bool]) -> None:
    assert got.weight_T.tolist() == pytest.approx(weight, abs=EXACT)
    assert got.masked_T.tolist() == masked


def test_icepop_by_hand():
    """The bounds belong to the band; the clip depends on the sign of the advantage."""
    of = ratios([0.5] * 4, [0.5] * 4, [0.25, 0.2, 0.9, 1.0], [1.0, 1.0, -2.0, -2.0])  # rho 2, 2.5, 0.56, 0.5; r 1
    close(PRESETS["grpo"].weigh(of), [2.0, 0.0, -2 * 0.5 / 0.9, -1.0], [False, True, False, False])
    of = ratios([0.65, 0.65, 0.35, 0.35], [0.5] * 4, [0.5] * 4, [1.0, -1.0, 1.0, -1.0])  # rho 1; r 1.3 and 0.7
    close(PRESETS["grpo"].weigh(of), [0.0, -1.3, 0.7, 0.0], [True, False, False, True])


def test_dis_by_hand():
    """The bounds do not belong to the band, and the sign does not matter."""
    of = ratios([0.75, 0.7, 0.5, 0.6], [0.1] * 4, [0.5, 0.5, 0.5, 0.1], [2.0, -2.0, 1.0, 1.0])
    got = preset_of("dis", {"eps_low": 0.5, "eps_high": 0.5}).weigh(of)  # s 1.5, 1.4, 1, 6
    close(got, [0.0, -2.8, 1.0, 0.0], [True, False, False, True])


def test_others_by_hand():
    two = [1.0, 1.0]
    close(PRESETS["tis"].weigh(ratios([0.6, 0.6], [0.6, 0.6], [0.1, 0.4], two)), [2.0, 1.5], [False] * 2)
    close(PRESETS["cispo"].weigh(ratios([0.6, 0.6], [0.1, 0.4], two, two)), [5.0, 1.5], [False] * 2)
    # D(0.5 || 0.25) = 0.5 ln 2 + 0.5 ln(0.5 / 0.75) = 0.144, D(0.9 || 0.1) = 0.8 ln 9 = 1.758
    of = ratios([0.5, 0.9], [0.5, 0.9], [0.25, 0.1], two)
    there = binary_kl(of.old_T, of.rollout_T)
    assert there.tolist() == pytest.approx([0.5 * math.log(4 / 3), 0.8 * math.log(9)])
    close(PRESETS["kpop"].weigh(of), [2.0, 0.0], [False, True])
    # Probabilities moved by 0.3 with the advantage, and by 0.3 against it.
    of = ratios([0.6, 0.3], [0.1] * 2, [0.3, 0.6], two)
    close(PRESETS["dppo"].weigh(of), [0.0, 0.5 - 2e-3 * math.log(0.5)], [True, False])
    # The geometric mean of r = 2 and 1/2 is 1: no token is clipped. Of 2 and 1 it is sqrt 2: both are.
    close(PRESETS["gspo"].weigh(ratios([0.6, 0.2], [0.3, 0.4], two, two)), two, [False] * 2)
    close(PRESETS["gspo"].weigh(ratios([0.6, 0.4], [0.3, 0.4], two, two)), [0.0, 0.0], [True] * 2)
    close(PRESETS["flash-reinforce"].weigh(ratios([0.5, 0.4], two, [0.5, 0.4], two)), two, [False] * 2)
    close(PRESETS["flash-reinforce"].weigh(ratios([0.5, 0.4], two, [0.5, 0.6], two)), [0.0, 0.0], [True] * 2)


def test_ratio_one_is_plain_policy_gradient():
    of = ratios([0.3, 0.6], [0.3, 0.6], [0.3, 0.6], [1.5, -0.5])
    for name, preset in PRESETS.items():
        got = preset.weigh(of)
        assert got.weight_T.tolist() == [1.5, -0.5], name
        assert not got.masked_T.any(), name


def test_log_probabilities_that_are_not_finite_are_masked_or_seen():
    """A bound drops NaN; what no bound drops is not finite in the loss, which the step names."""
    of = ratios([0.3, 0.3], [0.3, 0.3], [0.3, 0.3], [1.0, -1.0])
    for name, preset in PRESETS.items():
        bad = Ratios(of.current_T, of.old_T, torch.tensor([-0.7, math.nan]).double(), *list(vars(of).values())[3:6])
        weight, masked = preset.weigh(bad)
        uses_rollout = name not in ("gspo", "cispo", "reinforce")
        assert not uses_rollout or masked[1] or weight[1].isnan(), name


def test_advantages_by_hand():
    reward = torch.tensor([1.0, 0.0, 5.0, 0.0, 3.0, 7.0])
    group = torch.tensor([4, 4, 9, 4, 9, 2])
    third = 1 / 3
    assert group_mean(reward, group).tolist() == pytest.approx([2 * third, -third, 1, -third, -1, 0])
    std = math.sqrt(third)  # of 1, 0, 0 with n - 1
    want = [2 * third / (std + 1e-6), -third / (std + 1e-6), 1 / (math.sqrt(2) + 1e-6)]
    assert group_mean_std(reward, group).tolist() == pytest.approx([*want[:2], want[2], want[1], -want[2], 0])
    assert batch_mean(reward, group).tolist() == pytest.approx((reward.double() - 16 / 6).tolist())
    assert group_mean_std(torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64)).abs().max() < 1e-6


def test_a_new_algorithm_is_a_function_and_a_line(monkeypatch):
    def squared(of: Ratios, *, cap: float = 3.0) -> Weights:
        """min(s^2, cap) A."""
        return Weights((of.s**2).clamp_max(cap) * of.advantage_T, torch.zeros_like(of.s, dtype=torch.bool))

    monkeypatch.setitem(table.PRESETS, "squared", Preset(group_mean, squared, "token-mean", needs_old=False))
    of = ratios([0.6, 0.4], [1.0, 1.0], [0.3, 0.4], [1.0, 2.0])
    close(preset_of("squared").weigh(of), [3.0, 2.0], [False] * 2)
    close(preset_of("squared", {"cap": 9.0}).weigh(of), [4.0, 2.0], [False] * 2)


def test_wrong_names_are_told():
    with pytest.raises(
        ConfigError, match=r"unknown algorithm: grpo-nostd; did you mean grpo-no-std\? allowed: grpo, grpo-no-std, dis"
    ):
        preset_of("grpo-nostd")
    with pytest.raises(
        ConfigError, match=r"unknown parameter of dis: eps_hi; did you mean eps_high\? allowed: eps_low"
    ):
        preset_of("dis", {"eps_hi": 1.0})
