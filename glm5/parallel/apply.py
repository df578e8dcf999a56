"""Replaces modules of a sharded model (`table.py`) by ones with collectives.

    embedding    rows of other ranks are zero; all-reduce
    layer        attention and MLP give partial sums; all-reduce before each is added to the residual stream
    MTP layer    likewise, and after the projection of the concatenated embedding and hidden state
    head         not reduced: each rank has the logits of its own token ids, which the sampler handles (engine/sampling)

Modules are replaced in place and keep their parameters' names.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.model.block import DecoderLayer
from glm5.model.glm5 import Embedding, Glm5
from glm5.model.mtp import MTPLayer
from glm5.model.seams import KVView, Rope, Selection
from glm5.parallel.group import Group


class ParallelEmbedding(Embedding):
    """An embedding whose rows are sharded; this rank has `weight`."""

    def __init__(self, embedding: Embedding, group: Group):
        nn.Module.__init__(self)
        self.weight, self.group = embedding.weight, group
        self.first = group.shard.rank * len(embedding.weight)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.group.all_reduce(self.part(ids_T))

    def part(self, ids_T: Tensor) -> Tensor:
        """[T, D] of this rank's token ids, zeros for others."""
        place_T = ids_T - self.first
        is_local_T = (place_T >= 0) & (place_T < len(self.weight))
        rows_TD = F.embedding(torch.where(is_local_T, place_T, 0), self.weight)
        return rows_TD.masked_fill(~is_local_T[:, None], 0)


class ParallelLayer(DecoderLayer):
    """A layer whose attention and MLP compute partial sums."""

    def __init__(self, layer: DecoderLayer, group: Group):
        _adopt(self, layer)
        self.group = group

    def forward(self, x_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None) -> tuple[Tensor, Selection]:
        part_TD, used = self.self_attn(self.input_layernorm(x_TD), rope, view, selection)
        norm = self.post_attention_layernorm
        normed_TD, x_TD, _ = self.group.add_rms_norm(part_TD, x_TD, norm.weight, norm.eps, quantize=None)
        return x_TD + self.group.all_reduce(self.mlp(normed_TD)), used


class ParallelMTPLayer(ParallelLayer, MTPLayer):
    """The MTP layer likewise. `eh_proj` is replicated, but each rank multiplies by its slice of the columns only: its
    150 MB of bfloat16 are more than all other weights of a draft."""

    def merge(self, embed_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        both_TY, weight_DY = self.side_by_side(embed_TD, hidden_TD), self.eh_proj.weight
        (rank, size), num_columns = self.group.shard, weight_DY.shape[1]
        columns = slice(rank * num_columns // size, (rank + 1) * num_columns // size)
        return self.group.all_reduce(F.linear(both_TY[:, columns], weight_DY[:, columns]))


def connect(model: Glm5, group: Group) -> None:
    """Make a model loaded as `group.shard` compute the full model's result, up to rounding. Mutates it in place."""
    if group.shard.size == 1:
        return
    trunk = model.model
    trunk.embed_tokens = ParallelEmbedding(trunk.embed_tokens, group)
    for index, layer in enumerate(trunk.layers):
        assert isinstance(layer, DecoderLayer), f"{type(layer)=}"
        kind = ParallelMTPLayer if isinstance(layer, MTPLayer) else ParallelLayer
        trunk.layers[index] = kind(layer, group)


def _adopt(module: nn.Module, other: nn.Module) -> None:
    """Copy all parameters, modules and attributes of `other`, under the same names."""
    nn.Module.__init__(module)
    vars(module).update(vars(other))
