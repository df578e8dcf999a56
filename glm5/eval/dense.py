"""A checkpoint with another `index_topk`, such as dense attention: links to the same weights with a changed config."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from glm5.common.bounded import SETTINGS, read_bounded_text


@contextmanager
def selecting(checkpoint: Path, num_keys: int) -> Iterator[Path]:
    """A temporary copy of `checkpoint` with `index_topk` = `num_keys`; queries with fewer keys attend to all of them.

    The folder is deleted when the block ends.
    """
    with TemporaryDirectory(prefix="glm5-") as name:
        folder = Path(name)
        for file in checkpoint.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        config = json.loads(read_bounded_text(checkpoint / "config.json", SETTINGS))
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**config, "index_topk": num_keys}), encoding="utf-8")
        yield folder
