"""A checkpoint whose indexers select every key: the same weights under another config, in a folder of links."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from glm5.common.bounded import SETTINGS, read_bounded_text


@contextmanager
def selecting(checkpoint: Path, num_keys: int) -> Iterator[Path]:
    """`checkpoint` with `index_topk` changed, until the block is left. Who sees no more keys reads all."""
    with TemporaryDirectory(prefix="glm5-") as name:
        folder = Path(name)
        for file in checkpoint.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        config = json.loads(read_bounded_text(checkpoint / "config.json", SETTINGS))
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**config, "index_topk": num_keys}), encoding="utf-8")
        yield folder
