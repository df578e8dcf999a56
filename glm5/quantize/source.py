"""A checkpoint as layers: read, dequantized, checked for numbers that are none, and one ahead of their use.

A layer is a dictionary of tensors by their names on disk without `model.layers.N.`; of routed experts there is one
stack a projection, `mlp.experts.*.up_proj.weight` [E, F, D]. `outer` are the tensors outside of layers.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.fit import Fit, fit
from glm5.checkpoint.index import ShardIndex, scan
from glm5.checkpoint.names import SCALE_SUFFIX, place_of
from glm5.checkpoint.resolve import resolve
from glm5.checkpoint.shard import DTYPES, TensorEntry, read_into, read_tensor
from glm5.common.errors import CheckpointError, ConfigError
from glm5.config.model import ModelConfig
from glm5.config.tensors import TensorSpec
from glm5.kernels.block_scaled import BlockScaled

NUM_READERS = 4
Layer = dict[str, Tensor]


class Source:
    """A checkpoint folder or hub id to read from. Damage and misfits are refused at once, all of them listed."""

    def __init__(self, path_or_id: str | Path) -> None:
        self.directory = resolve(path_or_id)
        self.index: ShardIndex = scan(self.directory)
        self.fit: Fit = fit(self.index, ModelConfig.from_file(self.directory))
        self.fit.check()
        if self.fit.stored:
            raise CheckpointError(
                f"{self.directory}: is quantized already; give the BF16 or FP8 checkpoint that it was made of"
            )
        self.cfg = self.fit.cfg
        """Without the MTP layer where its tensors are not there."""
        self._by_layer: dict[int, list[TensorSpec]] = {}
        for spec in self.fit.specs.values():
            self._by_layer.setdefault(place_of(spec.name).layer_idx, []).append(spec)

    def check_output(self, out: Path) -> None:
        """Raises ConfigError where `out` would replace what is read, or stand within it."""
        own, target = self.directory.resolve(), out.expanduser().resolve()
        if target == own or own in target.parents:
            raise ConfigError(
                f"OUT: got {out}, which is the model that is read or within it; choose a folder beside it"
            )

    @property
    def layer_indices(self) -> list[int]:
        """OUTER, then all layers, the MTP layer last."""
        return sorted(self._by_layer)

    def specs(self, layer_idx: int) -> list[TensorSpec]:
        """The tensors of a layer as the architecture has them."""
        return self._by_layer[layer_idx]

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a tensor as it is held: FP8 weights are dequantized to bfloat16."""
        return torch.bfloat16 if name in self.fit.scaled else DTYPES[self.index.entries[name].dtype]

    def num_bytes(self, layer_idx: int) -> int:
        """Host memory that a layer takes."""
        return sum(torch.Size(s.shape).numel() * self.dtype_of(s.name).itemsize for s in self._by_layer[layer_idx])

    def layer(self, layer_idx: int) -> Layer:
        """A layer's tensors on the CPU. CheckpointError for a number that is infinite or none at all."""
        stacks: Layer = {}
        jobs: list[tuple[TensorEntry, Tensor]] = []
        for spec in self._by_layer[layer_idx]:
            place, entry = place_of(spec.name), self.index.entries[spec.name]
            if place.name not in stacks:
                stack = () if place.expert is None else (self.cfg.n_routed_experts,)
                stacks[place.name] = torch.empty((*stack, *spec.shape), dtype=self.dtype_of(spec.name))
            target = stacks[place.name] if place.expert is None else stacks[place.name][place.expert]
            jobs.append((entry, target))
        jobs.sort(key=lambda job: (job[0].file, job[0].start))
        with ThreadPoolExecutor(NUM_READERS) as readers:
            list(readers.map(lambda job: self._read(*job), jobs))
        return stacks

    def tensor(self, name: str) -> Tensor:
        """One tensor by its name on disk, as `layer` has it."""
        entry = self.index.entries[name]
        target = torch.empty(entry.shape, dtype=self.dtype_of(name))
        self._read(entry, target)
        return target

    def _read(self, entry: TensorEntry, target: Tensor) -> None:
        scale = self.index.entries.get(entry.name + SCALE_SUFFIX)
        if scale is not None:
            weight = BlockScaled(read_tensor(self.directory, entry), read_tensor(self.directory, scale))
            target.copy_(weight.dequantize(target.dtype))
        elif target.dtype == DTYPES[entry.dtype]:
            read_into(self.directory, entry, target)
        else:  # one expert is stored in another type than the first
            target.copy_(read_tensor(self.directory, entry))
        check_finite(target, self.directory, entry)

    def ahead(self, layer_indices: Sequence[int]) -> Iterator[tuple[int, Layer]]:
        """Layers in this order, each read while the one before is worked on: two are in memory at a time."""
        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(self.layer, layer_indices[0]) if layer_indices else None
            for position, layer_idx in enumerate(layer_indices):
                assert coming is not None
                layer = coming.result()
                later = layer_indices[position + 1 : position + 2]
                coming = reader.submit(self.layer, later[0]) if later else None
                yield layer_idx, layer
                del layer


def check_finite(tensor: Tensor, directory: Path, entry: TensorEntry) -> None:
    """CheckpointError for a number that is infinite or none at all."""
    # A sum is a third of the work of asking every element; where it overflows, ask.
    if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
        count = int((~tensor.isfinite()).sum())
        raise CheckpointError(
            f"{directory / entry.file}: {entry.name} holds {count} values that are not finite; fetch it again"
        )
