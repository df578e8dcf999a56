"""What is decided after a model's structure: weight formats, before the weights are loaded, and implementations."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.kernels.invariant import WIDTH_UNIT, has_alike_rows, impl_on
from glm5.kernels.quantized_weight import WeightFormat
from glm5.kernels.router import MAX_CHOICES
from glm5.model.experts import BlockScaledExperts, Experts, QuantizedExperts
from glm5.model.glm5 import Glm5
from glm5.model.linear import BlockScaledLinear, Linear, QuantizedLinear
from glm5.model.mlp import MLP
from glm5.model.moe import Router
from glm5.model.mtp import Rotation

# Widths of rows that are multiplied with something.
_WIDTHS = (
    "hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
)


def use_block_scaled(model: Glm5, module_names: Iterable[str]) -> None:
    """Replace the named `Linear` and `Experts` modules of `model` by FP8 ones, in place, on their device.

    Names are module paths (`model.layers.3.mlp.experts`). Weights of the new modules are uninitialised.
    """
    for name in module_names:
        _replace(model, name, _block_scaled)


def use_quantized(model: Glm5, formats: Mapping[str, WeightFormat]) -> None:
    """Replace `Linear` and `Experts` modules by those that hold quantized weights, by name; likewise."""
    for name, weight_format in formats.items():
        _replace(model, name, lambda path, module, weight_format=weight_format: _quantized(path, module, weight_format))


def empty_like(model: Glm5) -> Glm5:
    """A model of the same config and the same weight formats, with nothing in it: on the meta device."""
    kinds = dict(model.named_modules())
    with torch.device("meta"):
        empty = Glm5(model.cfg)
        use_block_scaled(
            empty, [name for name, kind in kinds.items() if isinstance(kind, BlockScaledLinear | BlockScaledExperts)]
        )
        use_quantized(
            empty,
            {name: kind.format for name, kind in kinds.items() if isinstance(kind, QuantizedLinear | QuantizedExperts)},
        )
        if any(isinstance(kind, Rotation) for kind in kinds.values()):
            empty.mtp.add_rotations()
    return empty


def _replace(model: Glm5, name: str, replacement: Callable[[str, torch.nn.Module], torch.nn.Module]) -> None:
    parent = model.get_submodule(name.rpartition(".")[0])
    old = model.get_submodule(name)
    with torch.device(next(old.parameters()).device):
        setattr(parent, name.rpartition(".")[2], replacement(name, old))


def _block_scaled(name: str, module: torch.nn.Module) -> BlockScaledLinear | BlockScaledExperts:
    match module:
        case Linear():
            out_features, in_features = module.weight.shape
            return BlockScaledLinear(in_features, out_features)
        case Experts():
            num_experts, hidden_size, intermediate_size = module.down_proj.shape
            return BlockScaledExperts(num_experts, hidden_size, intermediate_size)
        case _:
            raise TypeError(f"{name} is a {type(module).__name__}; only Linear and Experts can hold FP8")


def _quantized(name: str, module: torch.nn.Module, weight_format: WeightFormat) -> QuantizedLinear | QuantizedExperts:
    match module:
        case Linear():
            out_features, in_features = module.weight.shape
            return QuantizedLinear(in_features, out_features, weight_format)
        case Experts():
            num_experts, hidden_size, intermediate_size = module.down_proj.shape
            return QuantizedExperts(num_experts, hidden_size, intermediate_size, weight_format)
        case _:
            raise TypeError(f"{name} is a {type(module).__name__}; only Linear and Experts can be quantized")


def use_invariant(model: Glm5, local: ModelConfig | None = None) -> None:
    """Make rows of `model` independent of each other, bit for bit, in calls with exactly `pass_rows` rows; in place.
    `local`: the widths of its modules, where they are others than the config's.

    The view has to do its part: keys selected and read by the kernels' implementations of that name. Forward only from
    then on. Raises ConfigError for widths that cannot give that, and where products of this processor with so many
    threads do not. (What it rests on: kernels/invariant.py.)
    """
    wrong = {name: width for name in _WIDTHS if (width := getattr(local or model.cfg, name)) % WIDTH_UNIT}
    if wrong:
        got = ", ".join(f"{name} {width}" for name, width in wrong.items())
        raise ConfigError(
            f"deterministic mode needs widths that are multiples of {WIDTH_UNIT}, this model has {got}; run without it"
        )
    if model.device.type == "cpu":
        _check_products(model)
    impl, cfg = impl_on(model.device, model.dtype), model.cfg
    plain = impl if not weight_kinds(model) else "invariant"
    for module in model.modules():
        if isinstance(module, Experts) or (isinstance(module, Linear) and plain == "invariant_triton"):
            module.impl = plain
        elif isinstance(module, QuantizedExperts | MLP):
            module.impl = "invariant"
        elif isinstance(module, BlockScaledExperts):
            module.impl = impl
        elif isinstance(module, Router):
            fits = cfg.n_group == 1 and cfg.num_experts_per_tok <= MAX_CHOICES
            module.impl = impl if fits else "invariant"


def rows_are_alone(model: Glm5) -> bool:
    """Whether, after `use_invariant`, rows are independent of each other in calls with any number of rows."""
    seams = [module for module in model.modules() if isinstance(module, Linear | Experts | Router)]
    return not weight_kinds(model) and all(module.impl == "invariant_triton" for module in seams)


def _check_products(model: Glm5) -> None:
    """One product of each shape and dtype."""
    weights: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
    for module in model.modules():
        if isinstance(module, Linear):
            weights[module.weight.shape, module.weight.dtype] = module.weight
        elif isinstance(module, Experts):
            for stack in (module.gate_up_proj, module.down_proj):
                weights[stack.shape[1:], stack.dtype] = stack[0]
    if all(has_alike_rows(weight.detach()) for weight in weights.values()):
        return
    raise ConfigError(
        f"deterministic mode does not hold on this processor with num_threads {torch.get_num_threads()}: its products "
        "add up some rows in another order than others; allowed: num_threads 1 or 2, or MKL_CBWR=AVX2,STRICT in the "
        "environment"
    )


def weight_kinds(model: Glm5) -> list[str]:
    """Names of the formats of its quantized weights: FP8, w8a8, w4a8-g128-fp8."""
    kinds: dict[str, None] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            kinds[str(module.format)] = None
        elif isinstance(module, BlockScaledLinear | BlockScaledExperts):
            kinds["FP8"] = None
    return list(kinds)


def weight_bytes(model: Glm5) -> float:
    """Memory that a weight takes, on average; scales are not counted."""
    count = total = 0
    for tensor in model.parameters():
        # Of bytes without a sign, every one holds two codes.
        count += tensor.numel() * (2 if tensor.dtype == torch.uint8 else 1)
        total += tensor.numel() * tensor.element_size()
    return total / count
