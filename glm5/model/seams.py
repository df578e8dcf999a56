"""What the model asks of its surroundings: where keys live, and the rotation and selection that layers hand on.

The other seams are modules that can be swapped in place: `Linear` (linear.py), `Experts` (experts.py) and the head.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from glm5.kernels.rope import cached_freqs_cis, freqs_cis, rope_part, rope_table


@dataclass(frozen=True)
class Rope:
    """Rotation of the queries of one forward pass: one table for MLA and indexer (model spec, section 3.2)."""

    cos_TR2: Tensor
    sin_TR2: Tensor
    cis_TR2: Tensor | None

    @classmethod
    def at(cls, positions_T: Tensor, dim: int, theta: float, like: Tensor) -> "Rope":
        if (cis_TR2 := cached_freqs_cis(positions_T, dim, theta, like.dtype)) is not None:
            return cls(cis_TR2.real, cis_TR2.imag, cis_TR2)
        cos_TR2, sin_TR2 = rope_table(positions_T, dim, theta, like.dtype)
        return cls(cos_TR2, sin_TR2, freqs_cis(cos_TR2, sin_TR2))

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """x [T, W] or [T, heads, W] with dimensions `start` to `stop` rotated, interleaved pairs in and out. x is given
        away: the result may lie in its place."""
        return rope_part(x, self.cos_TR2, self.sin_TR2, self.cis_TR2, start, stop)


@dataclass(frozen=True)
class Selection:
    """Keys that an indexer picked; layers without an indexer reuse the nearest earlier one (IndexShare).

    `keys_TK` int32 positions within the request, ascending, then -1; None stands for every visible key.
    """

    keys_TK: Tensor | None


class KVView(Protocol):
    """The keys that the packed queries of one forward pass may see, and the kernel that reads them.

    Training hands in packed tensors (`PackedView`), inference pages of a cache. `append_*` come before `select` and
    `attend` of the same layer, so a query sees itself.
    """

    @property
    def positions_T(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Position of each query within its sequence, int64."""
        ...

    @property
    def reads_all(self) -> bool:
        """Whether indexers can be skipped: every query reads every visible key, and no index keys are stored."""
        ...

    def append_latent(self, layer_idx: int, latent_TL: Tensor) -> None:
        """Store one row (normed latent, rotated key part) per query."""
        ...

    def append_index_key(self, layer_idx: int, key_TI: Tensor) -> None:
        """Store one indexer key per query (after LayerNorm and rotation)."""
        ...

    def select(self, layer_idx: int, q_TJI: Tensor, w_TJ: Tensor, top_k: int, scale: float) -> Selection:
        """The `top_k` visible keys of largest index score for each query; ties go to the smaller position."""
        ...

    def attend(self, layer_idx: int, q_THL: Tensor, selection: Selection, *, scale: float, value_dim: int) -> Tensor:
        """Attention of absorbed queries over the selected latents: [T, H, value_dim]."""
        ...

    def attend_expanded(
        self, layer_idx: int, q_THX: Tensor, w_k_HNC: Tensor, w_v_HVC: Tensor, selection: Selection, *, scale: float
    ) -> Tensor | None:
        """The same over keys and values of each head, made of the latents by these weights: [T, H, V]. None, with
        nothing done, where queries are to be absorbed for `attend`."""
        ...


class LayerImpl(Protocol):
    """Another way to compute a decoder layer: native code, or activations computed again in the backward pass."""

    def __call__(
        self, x_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None
    ) -> tuple[Tensor, Selection] | None:
        """As `DecoderLayer.forward`, or None, with nothing done, where this way does not lead."""
        ...


class TrunkImpl(Protocol):
    """Another way to compute consecutive layers, of which the first has an indexer: native code. `recorded`, if a list,
    gets the experts of each call's rows, int16 [T, MoE layers, A]."""

    recorded: list[Tensor] | None

    def __call__(self, x_TD: Tensor, rope: Rope, view: KVView, layers: range) -> Tensor | None:
        """As `Glm5.through`, or None, with nothing done, where this way does not lead."""
        ...


class HiddenImpl(Protocol):
    """Another way to compute the hidden states: in the arithmetic of an engine."""

    def __call__(self, ids_T: Tensor, view: KVView) -> Tensor:
        """As `Glm5.forward`."""
        ...


def again() -> bool:
    """Whether this runs within a backward pass: activations are computed again. The same tensors must be made, and
    nothing counted or recorded."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]  # torch's own test
