"""A loss that ranks do not know of is an error there, rather than missing in the report."""

from types import SimpleNamespace

import pytest
import torch

from glm5.common.errors import TrainingError
from glm5.train.parallel.step import LOSSES, DistributedStep


def everywhere(losses):
    step = DistributedStep.__new__(DistributedStep)
    step.team = SimpleNamespace(device="cpu", total=lambda sums: 2 * sums)
    return step._sum_over_all_ranks({name: torch.tensor(value) for name, value in losses.items()})


def test_losses_are_added_up_by_name():
    given = {name: float(i) for i, name in enumerate(LOSSES) if i % 2}
    assert everywhere(given) == {name: 2 * value for name, value in given.items()}


def test_a_loss_of_another_name_is_refused():
    with pytest.raises(TrainingError, match=r"loss 'new' cannot be added up over ranks; allowed: index, balance, loss"):
        everywhere({"loss": 1.0, "new": 2.0})
