"""reasoning-gym's datasets, where the package is installed."""

from importlib.util import find_spec

import pytest

from glm5.common.errors import ConfigError, MissingExtra
from glm5.rl.environments.play import play, play_oracle
from glm5.rl.environments.protocol import Reply
from glm5.rl.environments.table import make

IS_INSTALLED = find_spec("reasoning_gym") is not None
installed = pytest.mark.skipif(
    not IS_INSTALLED, reason="reasoning-gym is not installed: pip install 'glm5[reasoning-gym]'"
)


@pytest.mark.skipif(IS_INSTALLED, reason="reasoning-gym is installed")
def test_the_extra_is_named():
    with pytest.raises(MissingExtra, match=r"glm5\[reasoning-gym\]"):
        make("reasoning-gym/chain_sum")


@installed
@pytest.mark.parametrize("name", ["chain_sum", "countdown", "spell_backward", "word_sorting"])
def test_datasets_are_environments(name):
    environment = make(f"reasoning-gym/{name}")
    tasks = [environment.task(seed, 0) for seed in range(10)]
    assert len({task.key for task in tasks}) == 10
    assert tasks == [environment.task(seed, 0) for seed in range(10)]
    for task in tasks:
        assert play_oracle(environment, task).rewards == [1.0]
        assert play(environment, task, lambda _: Reply("")).rewards == [0.0]
        assert play(environment, task, lambda _: Reply("Answer: wrong")).rewards[0] < 0.5


@installed
def test_an_unknown_dataset_is_named():
    with pytest.raises(ConfigError, match="did you mean chain_sum"):
        make("reasoning-gym/chainsum")
