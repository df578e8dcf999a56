"""The layout of parameters: the rows of each that every rank holds. Muon's exchange, saved states, checkpoints and
weight updates use it.

    rows      of a tensor [..., C]: those of its view [R, C]; of a vector [n]: n rows of one element
    layer     in one stage of the pipeline; the embedding in the first, final norm, head and MTP in the last
    experts   `expert_parallel` in the table: split over the expert ranks, then sharded over the ranks that share them
    others    sharded along the first dimension as in FSDP2: ceil(n / ranks) each, the last ones fewer or none

Every row has exactly one holder. (The last stage's copy of the embedding, for MTP, is not listed.)
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
    """The layout of a model on a mesh. `mtp_depth`: how often the MTP layer runs, which balances the last stage."""

    def __init__(self, mesh: Mesh, cfg: ModelConfig, shapes: Mapping[str, tuple[int, ...]], mtp_depth: int = 0) -> None:
        self.mesh, self.cfg = mesh, cfg
        self.shapes: dict[str, tuple[int, ...]] = dict(shapes)
        self.layers = split_layers(cfg, mesh.pipeline * mesh.stages, mtp_depth)

    def stage(self, name: str) -> int:
        found = _LAYER.match(name)
        if found is None:
            return 0 if "embed_tokens" in name else self.mesh.last_stage
        return next((s for s, part in enumerate(self.layers) if int(found[1]) in part), self.mesh.last_stage)

    def has_parameter(self, name: str, rank: int) -> bool:
        """Whether the parameter is in one of the rank's stages."""
        return self.stage(name) in self.mesh.stages_of(rank)

    def layers_of(self, rank: int) -> list[int]:
        """The layers of all stages of a rank, without the MTP layer."""
        return [layer for stage in self.mesh.stages_of(rank) for layer in self.layers[stage]]

    def dim(self, name: str) -> int:
        """The dimension that FSDP shards: the first, except for experts if there are fewer of them than ranks."""
        shape, mesh = list(self.shapes[name]), self.mesh
        if not is_expert_sharded(name):
            return 0
        among = mesh.shards // mesh.expert
        few = shape[0] // mesh.expert < among
        return 1 if few and shape[1] % among == 0 else 0

    def spans(self, name: str, rank: int) -> list[Span]:
        """Row ranges that `rank` holds, in the order of its local tensor; [] for none."""
        shape, mesh = list(self.shapes[name]), self.mesh
        if not self.has_parameter(name, rank):
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
        """The shape of the local tensor of `rank`."""
        shape = self.shapes[name]
        rows = sum(stop - start for start, stop in self.spans(name, rank))
        if len(shape) == 1:
            return (rows,)
        if self.dim(name) == 1:
            return (shape[0] // self.mesh.expert, rows * self.mesh.expert // shape[0], *shape[2:])
        return (rows // (math.prod(shape[1:-1]) or 1), *shape[1:])


def is_expert_sharded(name: str) -> bool:
    """Whether the parameter (stacked experts of the model) is split by expert. Frozen experts under LoRA are not."""
    experts, _, leaf = name.rpartition(".")
    if leaf not in _PROJECTION or experts.endswith(".base"):
        return False
    return placement_of(f"{experts}.0.{_PROJECTION[leaf]}.weight").expert_parallel


def split_layers(cfg: ModelConfig, stages: int, mtp_depth: int = 0) -> list[range]:
    """Consecutive layers for each stage, with the least time of the slowest. The last stage also runs the head, and the
    MTP layer and the head again at each depth. A stage begins with a layer with an indexer. Raises ConfigError."""
    starts = [0, *(i for i in range(1, cfg.num_hidden_layers) if cfg.has_indexer(i))]
    if stages > len(starts):
        raise ConfigError(
            f"parallel.pipeline: got {stages}; a stage begins with a layer that has an indexer of its own, and this "
            f"model has {len(starts)}"
        )
    head = cfg.vocab_size * cfg.hidden_size
    layer = count_parameters(cfg).active / cfg.num_hidden_layers
    last = head * (1 + mtp_depth) + layer * mtp_depth
    # best[i]: (time of the slowest stage, first layers of stages) for the layers from starts[i] on
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
    """The range of part `index` as in torch.chunk, with empty parts at the end."""
    size = -(-count // parts)
    return min(index * size, count), min((index + 1) * size, count)


def _listed(span: Span) -> list[Span]:
    return [span] if span[1] > span[0] else []
