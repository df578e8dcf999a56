"""Sliding-window attention instead of the indexers' selection: the report's ablation (2.1.2), with the same weights.

    S   a layer that reads the last `size` keys     F   one that reads all      pattern, repeated over the layers: "SF"

"SWA Interleave" alternates. "SWA Pattern" is the result of a beam search: starting from all F, two more layers become S
in each step, and the best `BEAM` patterns are kept. Windows are implemented by a view; the model is not changed.
"""

import logging
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from glm5.config.step import WindowConfig
from glm5.model.packed import PackedView
from glm5.model.seams import Selection

logger = logging.getLogger(__name__)

BEAM = 8
LAYERS_A_STEP = 2


class WindowView(PackedView):
    """A view of packed sequences with sliding windows in the layers that `window` names."""

    def __init__(self, window: WindowConfig, lengths: list[int], device: torch.device | str = "cpu") -> None:
        super().__init__(lengths, device, stage="dense")
        self._window = window
        self._near = Selection(self._table(window.size) if self.max_len > window.size else None)

    def _table(self, size: int) -> Tensor:
        """Keys of each query, ascending; rows with fewer than `size` keys end with -1."""
        keys_TK = self.end_T[:, None] - torch.arange(size, 0, -1, device=self.end_T.device, dtype=torch.int32)
        missing_T1 = (size - self.end_T[:, None]).clamp_min(0)
        keys_TK = keys_TK + missing_T1
        return keys_TK.masked_fill(keys_TK >= self.end_T[:, None], -1)

    def attend(self, layer_idx: int, q_THL: Tensor, selection: Selection, *, scale: float, value_dim: int) -> Tensor:
        read = self._near if self._is_windowed(layer_idx) else Selection(None)
        return super().attend(layer_idx, q_THL, read, scale=scale, value_dim=value_dim)

    def attend_expanded(
        self, layer_idx: int, q_THX: Tensor, w_k_HNC: Tensor, w_v_HVC: Tensor, selection: Selection, *, scale: float
    ) -> Tensor | None:
        if self._is_windowed(layer_idx):
            return None
        return super().attend_expanded(layer_idx, q_THX, w_k_HNC, w_v_HVC, Selection(None), scale=scale)

    def _is_windowed(self, layer_idx: int) -> bool:
        return self._window.pattern_of(layer_idx) == "S" and self.max_len > self._window.size


def keys_read(window: WindowConfig, num_layers: int, seq_len: int) -> float:
    """The share of dense attention's keys that are read, over all layers of a sequence."""
    seen = [min(position, window.size) for position in range(1, seq_len + 1)]
    share = sum(seen) / (seq_len * (seq_len + 1) / 2)
    windowed = sum(window.pattern_of(layer) == "S" for layer in range(num_layers)) / num_layers
    return windowed * share + 1 - windowed


def search_pattern(loss: Callable[[str], float], num_layers: int, num_windows: int) -> tuple[str, dict[str, float]]:
    """The best pattern of `num_windows` windows that a beam search finds, and the losses of all patterns tried.

    The report uses a beam of 8 and two layers a step, at 16K tokens on RULER, for half of the layers.
    """
    if not 0 < num_windows < num_layers:
        raise ValueError(f"num_windows: got {num_windows}; allowed: 1 to {num_layers - 1}, one layer staying full")
    beam, tried = ["F" * num_layers], {}
    done = 0
    while done < num_windows:
        step = min(LAYERS_A_STEP, num_windows - done)
        done += step
        further = {_with_windows(pattern, layers) for pattern in beam for layers in _choices(pattern, step)}
        found = {pattern: loss(pattern) for pattern in sorted(further)}
        tried |= found
        beam = sorted(found, key=found.__getitem__)[:BEAM]
        logger.info("%d windows: %s, loss %.4g, the best of %d", done, beam[0], found[beam[0]], len(found))
    return beam[0], tried


def _choices(pattern: str, step: int) -> list[tuple[int, ...]]:
    return list(combinations([layer for layer, kind in enumerate(pattern) if kind == "F"], step))


def _with_windows(pattern: str, layers: tuple[int, ...]) -> str:
    return "".join("S" if layer in layers else kind for layer, kind in enumerate(pattern))
