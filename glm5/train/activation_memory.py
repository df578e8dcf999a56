"""What a layer keeps for its backward pass: less of it, computed again then, or in host memory meanwhile.

    recompute = "mlp"      what MLPs and experts keep is computed again
    recompute = "layer"    a layer keeps its input
    offload                what is kept lies in host memory, copied while the next layers run

Gradients are the same. What a layer selected is not selected again: scores that tie in a rounding would fall otherwise.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from glm5.config.train import Recompute
from glm5.model.block import DecoderLayer
from glm5.model.glm5 import Glm5
from glm5.model.seams import KVView, Rope, Selection

_SMALL = 1 << 18  # elements that stay where they are


def keep(model: Glm5, recompute: Recompute | None, *, offload: bool) -> None:
    """Let every layer of `model` keep as much from now on."""
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.impl = _Kept(layer, recompute, offload=offload) if recompute or offload else None


class _Kept:
    """A `LayerImpl` of torch operations."""

    def __init__(self, layer: DecoderLayer, recompute: Recompute | None, *, offload: bool):
        self.layer, self.recompute, self.offload = layer, recompute, offload

    def __call__(
        self, x_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None
    ) -> tuple[Tensor, Selection] | None:
        if not torch.is_grad_enabled():
            return None
        once: Any = _SelectedOnce(view)  # a view, for all that a layer asks of it
        with self._place(x_TD.device):
            if self.recompute == "layer":
                return _again(self.layer.compute, x_TD, rope, once, selection)
            if self.recompute is None:
                return self.layer.compute(x_TD, rope, view, selection)
            attn_TD, used = self.layer.self_attn(self.layer.input_layernorm(x_TD), rope, view, selection)
            x_TD = x_TD + attn_TD
            return x_TD + _again(self._mlp, x_TD), used

    def _mlp(self, x_TD: Tensor) -> Tensor:
        return self.layer.mlp(self.layer.post_attention_layernorm(x_TD))

    def _place(self, device: torch.device) -> AbstractContextManager[object]:
        if not self.offload:
            return nullcontext()
        held = {weight.untyped_storage().data_ptr() for weight in self.layer.parameters()}
        return torch.autograd.graph.saved_tensors_hooks(_Away.packing(held), _Away.back)


class _SelectedOnce:
    """A view whose selection, when it is asked for again, is the one it gave."""

    def __init__(self, view: KVView):
        self._view = view
        self._selection: Selection | None = None

    def select(self, *args: Any, **kwargs: Any) -> Selection:
        if self._selection is None:
            self._selection = self._view.select(*args, **kwargs)
        return self._selection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


class _Away:
    """A tensor in host memory, and where it belongs."""

    def __init__(self, tensor: Tensor):
        self._device, self._copied = tensor.device, None
        if not tensor.is_cuda:
            self._tensor = tensor.clone()
            return
        stream = _copying(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = stream.record_event()
        tensor.record_stream(stream)  # its memory is another's only when it has been copied

    @staticmethod
    def packing(held: set[int]) -> Callable[[Tensor], "Tensor | _Away"]:
        """What is small, or a weight whose storage is in `held`, stays."""

        def pack(tensor: Tensor) -> "Tensor | _Away":
            stays = tensor.numel() <= _SMALL or tensor.untyped_storage().data_ptr() in held
            return tensor if stays else _Away(tensor)

        return pack

    @staticmethod
    def back(held: "Tensor | _Away") -> Tensor:
        if isinstance(held, Tensor):
            return held
        if held._copied is not None:
            torch.cuda.current_stream(held._device).wait_event(held._copied)
        return held._tensor.to(held._device, non_blocking=True)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copying(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _again(run: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
