"""Activation checkpointing, and offloading of activations to host memory.

    recompute = "mlp"      activations of MLPs and experts are recomputed in the backward pass
    recompute = "layer"    a layer saves only its input
    offload                saved tensors are copied to host memory while the next layers run

Gradients do not change. The selection of keys is not recomputed: ties after rounding could be resolved differently.
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

_MIN_OFFLOAD = 1 << 18  # tensors with at most so many elements are not offloaded


def set_activation_memory(model: Glm5, recompute: Recompute | None, *, offload: bool) -> None:
    """Set recomputation and offloading for every layer of `model`, in place."""
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.impl = _RecomputingLayer(layer, recompute, offload=offload) if recompute or offload else None


class _RecomputingLayer:
    """A `LayerImpl` that recomputes or offloads activations."""

    def __init__(self, layer: DecoderLayer, recompute: Recompute | None, *, offload: bool):
        self.layer, self.recompute, self.offload = layer, recompute, offload

    def __call__(
        self, x_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None
    ) -> tuple[Tensor, Selection] | None:
        if not torch.is_grad_enabled():
            return None
        cached: Any = _CachedSelection(view)
        with self._saved_tensors_hooks(x_TD.device):
            if self.recompute == "layer":
                return recompute(self.layer.compute, x_TD, rope, cached, selection)
            if self.recompute is None:
                return self.layer.compute(x_TD, rope, view, selection)
            attn_TD, used = self.layer.self_attn(self.layer.input_layernorm(x_TD), rope, view, selection)
            x_TD = x_TD + attn_TD
            return x_TD + recompute(self._mlp, x_TD), used

    def _mlp(self, x_TD: Tensor) -> Tensor:
        return self.layer.mlp(self.layer.post_attention_layernorm(x_TD))

    def _saved_tensors_hooks(self, device: torch.device) -> AbstractContextManager[object]:
        if not self.offload:
            return nullcontext()
        weights = {weight.untyped_storage().data_ptr() for weight in self.layer.parameters()}
        return torch.autograd.graph.saved_tensors_hooks(_OffloadedTensor.pack_hook(weights), _OffloadedTensor.unpack)


class _CachedSelection:
    """A `KVView` that selects keys once and returns the same selection in later calls."""

    def __init__(self, view: KVView):
        self._view = view
        self._selection: Selection | None = None

    def select(self, *args: Any, **kwargs: Any) -> Selection:
        if self._selection is None:
            self._selection = self._view.select(*args, **kwargs)
        return self._selection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


class _OffloadedTensor:
    """A saved tensor in host memory, and its device."""

    def __init__(self, tensor: Tensor):
        self._device, self._copied = tensor.device, None
        if not tensor.is_cuda:
            self._tensor = tensor.clone()
            return
        stream = _copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = stream.record_event()
        tensor.record_stream(stream)  # its memory may be reused only after the copy

    @staticmethod
    def pack_hook(weights: set[int]) -> Callable[[Tensor], "Tensor | _OffloadedTensor"]:
        """A hook that offloads all but small tensors and the weights with these storages."""

        def pack(tensor: Tensor) -> "Tensor | _OffloadedTensor":
            stays = tensor.numel() <= _MIN_OFFLOAD or tensor.untyped_storage().data_ptr() in weights
            return tensor if stays else _OffloadedTensor(tensor)

        return pack

    @staticmethod
    def unpack(saved: "Tensor | _OffloadedTensor") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved._copied is not None:
            torch.cuda.current_stream(saved._device).wait_event(saved._copied)
        return saved._tensor.to(saved._device, non_blocking=True)


_copy_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _copy_streams:
        _copy_streams[device] = torch.cuda.Stream(device)
    return _copy_streams[device]


def recompute(run: Callable[..., Any], *args: Any) -> Any:
    """`run(*args)`, whose activations are recomputed in the backward pass."""
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
