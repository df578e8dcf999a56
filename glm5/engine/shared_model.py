"""A model that its caller keeps: the engine runs modules of its own over the same weights, and detects changed weights.

The caller's modules are never modified, so it can train them before, between and after answers. Weights are in memory
once, except for those that fused products on a GPU join (fused_linear.py) and those that native code packs (native.py),
which are copied. Before every step, each tensor's version, which in-place operations increase, and its address are
compared. Fused optimizers and writes through `.data` do not increase the version: before a request begins and when a
pause ends, sums of all trainable weights are compared too.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from glm5.common.errors import ConfigError
from glm5.model.glm5 import Glm5
from glm5.model.lowering import empty_like

_HINT = "give LLM a model as glm5.load returns it, with adapters merged and shards gathered, or its folder"


class SharedModel:
    """`model`: the engine's, over the weights of `theirs`. Raises ConfigError if those are not a GLM-5 model's."""

    def __init__(self, theirs: Glm5):
        self.theirs, self.model = theirs, empty_like(theirs).eval()
        own, given = _weights(self.model), _weights(theirs)
        _check_names(own, given)
        for name, tensor in given.items():
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.shape != own[name].shape:
                wanted = f"{name} is a {type(tensor).__name__} of shape {list(tensor.shape)}"
                raise ConfigError(f"model: {wanted}; allowed: an unsharded tensor {list(own[name].shape)}; {_HINT}")
            _set_tensor(self.model, name, tensor)
        self._own = _weights(self.model)
        self._note(given)

    def has_changed(self, *, closely: bool) -> bool:
        """Whether weights have changed since the start or the last `adopt`. `closely`: also compare sums."""
        if not closely:
            return _stamp(self._given) != self._stamps
        given = _weights(self.theirs)
        if given.keys() != self._own.keys():
            return True
        given = {name: given[name] for name in self._own}
        return _stamp(given) != self._stamps or _sums(given) != self._summed

    def adopt(self) -> None:
        """Use the caller's current weights. Raises ConfigError if they now have other names, shapes or dtypes."""
        given = _weights(self.theirs)
        _check_names(self._own, given)
        for (name, own), (_, address) in zip(self._own.items(), self._stamps, strict=True):
            tensor = given[name]
            if (tensor.shape, tensor.dtype, tensor.device) != (own.shape, own.dtype, own.device):
                raise ConfigError(
                    f"model: {name} became {tensor.dtype} {list(tensor.shape)} on {tensor.device}; allowed while an "
                    f"engine runs it: {own.dtype} {list(own.shape)} on {own.device}"
                )
            if own.data_ptr() == address:
                own.data = tensor.data
            else:
                own.data.copy_(tensor.data)
        self._note(given)

    def _note(self, given: dict[str, Tensor]) -> None:
        """Record these weights for later comparison, by the names of the engine's own."""
        self._given = {name: given[name] for name in self._own}
        self._stamps, self._summed = _stamp(self._given), _sums(self._given)


def _weights(model: Glm5) -> dict[str, Tensor]:
    return dict(model.state_dict(keep_vars=True))


def _check_names(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    if other := sorted(own.keys() ^ given.keys()):
        verb = "lacks" if other[0] in own else "has"
        raise ConfigError(f"model: it {verb} {other[0]}, unlike its config; {_HINT}")


def _set_tensor(model: Glm5, name: str, tensor: Tensor) -> None:
    """Make `tensor`'s memory the parameter or buffer of that name."""
    path, _, leaf = name.rpartition(".")
    parent = model.get_submodule(path)
    with torch.inference_mode(mode=False):
        held = tensor.detach()
        is_parameter = isinstance(getattr(parent, leaf), nn.Parameter)
        setattr(parent, leaf, nn.Parameter(held, requires_grad=False) if is_parameter else held)


def _stamp(given: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """Version and address of each tensor. (Tensors of inference mode have no version.)"""
    return [(0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in given.values()]


@torch.inference_mode()
def _sums(given: Mapping[str, Tensor]) -> list[int]:
    """Sums of each trainable tensor, as bits, since a sum may be NaN."""
    learning = [tensor for tensor in given.values() if tensor.dtype.is_floating_point and tensor.element_size() > 1]
    is_wide = any(tensor.dtype == torch.float64 for tensor in learning)
    sums = [tensor.sum(dtype=torch.float64 if is_wide else torch.float32) for tensor in learning]
    return torch.stack(sums).double().view(torch.int64).tolist()
