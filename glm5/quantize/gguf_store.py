"""A run whose weights are one GGUF file: laid out before the first layer, and filled layer by layer."""

from pathlib import Path
from typing import Any

from torch import Tensor

from glm5.checkpoint.gguf import file
from glm5.checkpoint.gguf.metadata import add_config, add_general
from glm5.checkpoint.gguf.tensors import gguf_tensors, types_of
from glm5.checkpoint.gguf.vocabulary import add_vocabulary
from glm5.common.errors import CheckpointError
from glm5.quantize.job import Job
from glm5.quantize.store import Store


class GgufStore(Store):
    """As Store. A layer that is done, is: its bytes are in the file before progress.json names it."""

    def __init__(self, job: Job, out: Path, fingerprint: dict[str, Any], *, restart: bool = False) -> None:
        super().__init__(out, fingerprint, restart=restart)
        self.path = self.model / file.FILE
        if not self.layers:
            _create(job, self.path)
        elif not self.path.is_file():
            raise CheckpointError(f"{self.path}: is absent, and progress.json names its layers; --restart begins anew")
        self.entries = file.entries(self.path, job.cfg)

    def write_layer(self, layer_idx: int, tensors: dict[str, Tensor], max_shard_bytes: int) -> dict[str, Any]:
        file.fill(self.path, self.entries, tensors)
        return {"files": {file.FILE: list(tensors)}}

    def finish(self, prefix: str) -> None:
        self.publish()


def _create(job: Job, path: Path) -> None:
    tensors = gguf_tensors(job.cfg)
    types = types_of(tensors, job.source.dtype_of, job.run.plan.schemes)

    def add_fields(writer: Any) -> None:
        add_general(writer, job.source.directory.name, types.values())
        add_config(writer, job.cfg)
        add_vocabulary(writer, job.source.directory, job.cfg.vocab_size)

    file.create(path, {tensor: types[tensor.name] for tensor in tensors}, add_fields)
