"""Who holds which rows of every parameter. All that moves tensors between ranks or runs asks here: Muon's exchange,
saved states, checkpoints and pushed weights.

    rows      of a tensor [..., C]: those of its view [R, C]; of a vector [n], n rows of one value
    layer     lies in one stage of the pipeline; the embedding in the first, final norm, head and MTP in the last
    experts   `expert_parallel` in the table: whole ones over the expert ranks, then over those who share them
    the rest  cut along its first dimension, as FSDP2 does: ceil(n / ranks) each, the last ones less or nothing

Every row has exactly one holder. (The last stage reads the embedding too, for MTP: a copy, which is not listed.)
"""

import math
import re
from collections.abc import Mapping
from itertools import pairwise

from glm5.checkpoint.names import STACKED
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.tensors import count_parameters
from glm5.parallel.table import placement_of
from glm5.train.parallel.mesh import Mesh

Span = tuple[int, int]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PROJECTION = {parameter: projection for projection, (parameter, _, _) in STACKED.items()}


class RowLayout:
    """Of a model on a mesh. `mtp_depth`: how often the MTP layer runs, which the last stage has to spare time for."""

    def __init__(self, mesh: Mesh, cfg: ModelConfig, shapes: Mapping[str, tuple[int, ...]], mtp_depth: int = 0) -> None:
        self.mesh, self.cfg = mesh, cfg
        self.shapes: dict[str, tuple[int, ...]] = dict(shapes)
        self.layers = split_layers(cfg, mesh.pipeline * mesh.stages, mtp_depth)

    def stage(self, name: str) -> int:
        found = _LAYER.match(name)
        if found is None:
            return 0 if "embed_tokens" in name else self.mesh.last_stage
        return next((s for s, part in enumerate(self.layers) if int(found[1]) in part), self.mesh.last_stage)

    def is_of(self, name: str, rank: int) -> bool:
        """Whether a stage of the rank has it."""
        return self.stage(name) in self.mesh.stages_of(rank)

    def layers_of(self, rank: int) -> list[int]:
        """Of all stages that it has; without the MTP layer."""
        return [layer for stage in self.mesh.stages_of(rank) for layer in self.layers[stage]]

    def dim(self, name: str) -> int:
        """The dimension that FSDP cuts: the first, but for experts of which there are fewer than ranks."""
        shape, mesh = list(self.shapes[name]), self.mesh
        if not is_expert_sharded(name):
            return 0
        among = mesh.shards // mesh.expert
        few = shape[0] // mesh.expert < among
        return 1 if few and shape[1] % among == 0 else 0

    def spans(self, name: str, rank: int) -> list[Span]:
        """Rows `rank` holds, in the order in which they lie in its tensor; [] for none."""
        shape, mesh = list(self.shapes[name]), self.mesh
        if not self.is_of(name, rank):
            return []
        rows = math.prod(shape[:-1]) // shape[0] if len(shape) > 1 else 1  # of an element along the first dimension
        if not is_expert_sharded(name):
            start, stop = _chunk(shape[0], mesh.shards, mesh.shard(rank))
            return _listed((start * rows, stop * rows))
        experts, among = shape[0] // mesh.expert, mesh.shards // mesh.expert
        row, owner = divmod(mesh.shard(rank), mesh.expert)
        first = owner * experts
        if self.dim(name) == 0:
            start, stop = _chunk(experts, among, row)
            return _listed(((first + start) * rows, (first + stop) * rows))
        start, stop = _chunk(rows, among, row)
        return [(e * rows + start, e * rows + stop) for e in range(first, first + experts)]

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Of the tensor that `rank` holds."""
        shape = self.shapes[name]
        rows = sum(stop - start for start, stop in self.spans(name, rank))
        if len(shape) == 1:
            return (rows,)
        if self.dim(name) == 1:
            return (shape[0] // self.mesh.expert, rows * self.mesh.expert // shape[0], *shape[2:])
        return (rows // (math.prod(shape[1:-1]) or 1), *shape[1:])


def is_expert_sharded(name: str) -> bool:
    """Whether whole experts of the parameter (of the model, stacked) may lie on different ranks. Not of those that are
    stored as codes: they are cut like the rest."""
    experts, _, leaf = name.rpartition(".")
    if leaf not in _PROJECTION or experts.endswith(".base"):
        return False
    return placement_of(f"{experts}.0.{_PROJECTION[leaf]}.weight").expert_parallel


def split_layers(cfg: ModelConfig, stages: int, mtp_depth: int = 0) -> list[range]:
    """Consecutive layers for each stage, the slowest as fast as possible; the last one also runs the head, and the MTP
    layer and the head again at each depth. A stage begins with a layer that selects keys itself. Raises ConfigError."""
    starts = [0, *(i for i in range(1, cfg.num_hidden_layers) if cfg.has_indexer(i))]
    if stages > len(starts):
        raise ConfigError(
            f"parallel.pipeline: got {stages}; a stage begins with a layer that has an indexer of its own, and this "
            f"model has {len(starts)}"
        )
    head = cfg.vocab_size * cfg.hidden_size
    layer = count_parameters(cfg).active / cfg.num_hidden_layers
    last = head * (1 + mtp_depth) + layer * mtp_depth
    # best[i]: (slowest stage, where stages begin) of layers from starts[i] on, in as many stages as were added so far
    ends = [*starts[1:], cfg.num_hidden_layers]
    best = {i: (layer * (ends[-1] - start) + last, (start,)) for i, start in enumerate(starts)}
    for _ in range(stages - 1):
        best = {
            i: min(
                (max(layer * (starts[j] - start), best[j][0]), (start, *best[j][1]))
                for j in range(i + 1, len(starts))
                if j in best
            )
            for i, start in enumerate(starts)
            if any(j in best for j in range(i + 1, len(starts)))
        }
    bounds = [*best[0][1], cfg.num_hidden_layers]
    return [range(a, b) for a, b in pairwise(bounds)]


def _chunk(count: int, parts: int, index: int) -> Span:
    """As torch.chunk cuts, with empty parts at the end."""
    size = -(-count // parts)
    return min(index * size, count), min((index + 1) * size, count)


def _listed(span: Span) -> list[Span]:
    return [span] if span[1] > span[0] else []
