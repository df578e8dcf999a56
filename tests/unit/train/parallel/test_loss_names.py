"""A loss that a step does not know of is one clear error, rather than missing in the sum or the report."""

from types import SimpleNamespace

import pytest
import torch

from glm5.common.errors import TrainingError
from glm5.config.step import LossConfig
from glm5.train.objective import NextToken
from glm5.train.parallel.step import DistributedStep


def step() -> DistributedStep:
    step = DistributedStep.__new__(DistributedStep)
    step.team = SimpleNamespace(device="cpu", total=lambda sums: 2 * sums)
    step.cfg = LossConfig()
    step.objective = NextToken(step.cfg, has_mtp=True)
    return step


def test_losses_are_added_up_by_name():
    given = {name: float(i) for i, name in enumerate(step().factors) if i % 2}
    got = step()._sum_over_all_ranks({name: torch.tensor(value) for name, value in given.items()})
    assert got == {name: 2 * value for name, value in given.items()}


def test_a_loss_of_another_name_is_refused():
    losses = {"loss": torch.ones((), requires_grad=True), "new": torch.ones(())}
    with pytest.raises(TrainingError, match=r"loss 'new' is none of this step's; allowed: index, balance, loss, mtp"):
        step()._weighted(losses)
