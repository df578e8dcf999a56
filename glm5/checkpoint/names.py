"""How tensors on disk map to parameters in memory, and to layers: the one table that load, save and inspect use.

On disk there is one tensor per expert; in memory experts are stacked, gate above up. Every other tensor has the same
name in both places. An FP8 weight and its block scales are a pair on disk (`<name>`, `<name>_scale_inv`) and in memory.
"""

import re
from typing import NamedTuple

from torch import Tensor

SCALE_SUFFIX = "_scale_inv"
OUTER = -1  # the layer index of tensors outside of layers
STACK = "mlp.experts.*."  # prefix of the experts' tensors in quant/graph.py
EXPERT = re.compile(r"\.experts\.\d+\.")
MERGED: dict[str, tuple[str, ...]] = {
    "self_attn.fused_qkv_a_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "self_attn.fused_qkv_a_proj_with_mqa": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_experts.gate_up_proj": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.experts": (f"{STACK}gate_proj", f"{STACK}up_proj", f"{STACK}down_proj"),
}
"""What other engines compute in one product, by their name for it within a layer: vLLM's, then SGLang's for the same
parts. The parts must be quantized alike."""

# projection on disk -> (stacked parameter, which part of its rows, out of how many parts)
STACKED = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
}
_EXPERT = re.compile(
    r"(?P<experts>.+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight(?P<scale>_scale_inv)?"
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_IN_STACK = re.compile(r"mlp\.experts\.(\d+)\.(\w+)\.weight")


class Slot(NamedTuple):
    """Where a tensor from disk is in memory: a parameter of the model, or the rows of one expert in it."""

    parameter: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1

    @property
    def module(self) -> str:
        """The path of the module that owns the parameter."""
        return self.parameter.rpartition(".")[0]

    def view(self, parameter: Tensor) -> Tensor:
        """The rows of `parameter` that hold this tensor; a view, contiguous if the parameter is.

        This holds for stacked scales, too: gate and up have block grids of equal height, one above the other.
        """
        if self.expert is None:
            return parameter
        return parameter[self.expert].chunk(self.num_parts)[self.part]


def slot_of(name: str) -> Slot:
    """Where the tensor called `name` on disk is in memory. It does not check that the model has such a tensor."""
    found = _EXPERT.fullmatch(name)
    if found is None or found["projection"] not in STACKED:
        return Slot(name)
    parameter, part, num_parts = STACKED[found["projection"]]
    scale = found["scale"] or ""
    return Slot(f"{found['experts']}.{parameter}{scale}", int(found["expert"]), part, num_parts)


class Place(NamedTuple):
    """A tensor's layer (or OUTER), its name within the layer, and its index among the experts."""

    layer_idx: int
    name: str
    expert: int | None = None


def place_of(name: str) -> Place:
    """The place of the tensor called `name` on disk."""
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        return Place(OUTER, name)
    expert = _IN_STACK.fullmatch(in_layer[2])
    if expert is None:
        return Place(int(in_layer[1]), in_layer[2])
    return Place(int(in_layer[1]), f"{STACK}{expert[2]}.weight", int(expert[1]))


def name_of(layer_idx: int, name: str, expert: int | None = None) -> str:
    """The name on disk of a tensor of a layer."""
    if layer_idx == OUTER:
        return name
    if expert is not None:
        name = name.replace(STACK, f"mlp.experts.{expert}.", 1)
    return f"model.layers.{layer_idx}.{name}"
