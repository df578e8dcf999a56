"""A run that several files look at or compare with."""

from pathlib import Path

import pytest

from glm5.rl.loop import run
from tests.support.rl_recipe import small_recipe


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """The folder of a finished run of the small recipe."""
    folder = tmp_path_factory.mktemp("done")
    recipe = small_recipe(folder)
    assert run(recipe) == folder / "run" / "policy"
    return folder
