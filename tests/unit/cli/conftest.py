import pytest

from glm5.checkpoint.init import write_random
from glm5.config.presets import preset


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory) -> str:
    """A random tiny checkpoint with its tokenizer."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_random(preset("tiny"), path, seed=3)
    return str(path)
