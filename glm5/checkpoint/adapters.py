"""LoRA adapters in PEFT's layout: written, read, and merged into a model.

    W' = W + s B A      A [r, I], B [O, r]      s = alpha / r, or alpha / sqrt(r) where use_rslora is set

`adapter_config.json` has r, lora_alpha and target_modules; `adapter_model.safetensors` has for each adapted matrix
`base_model.model.<module>.lora_A.weight` and `.lora_B.weight`. FP8 weights are dequantized, added to, and quantized
anew in the same blocks.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5.common.atomic import atomic_dir
from glm5.common.bounded import SETTINGS, open_regular, read_bounded_text
from glm5.common.errors import CheckpointError
from glm5.kernels.block_scaled import quantize_blocks
from glm5.model.glm5 import Glm5
from glm5.model.linear import BlockScaledLinear, Linear

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNSUPPORTED = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")


class Adapter(NamedTuple):
    """`scale` is s. `matrices` maps a module's name to (A [r, I], B [O, r])."""

    scale: float
    matrices: dict[str, tuple[Tensor, Tensor]]


def write_adapter(
    folder: Path, matrices: Mapping[str, tuple[Tensor, Tensor]], *, rank: int, alpha: float, base: str
) -> None:
    """Write `matrices` (by module: A [r, I], B [O, r]) as an adapter into `folder`, atomically.

    Matrices are stored in float32. `base`: path or id of the base checkpoint.
    """
    tensors: dict[str, Tensor] = {}
    for module, pair in matrices.items():
        for letter, matrix in zip("AB", pair, strict=True):
            tensors[f"{_PREFIX}{module}.lora_{letter}.weight"] = matrix.detach().float().cpu().contiguous()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in matrices}),
    }
    with atomic_dir(folder) as building:
        (building / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, building / WEIGHTS, metadata={"format": "pt"})


def read_adapter(folder: str | Path) -> Adapter:
    """Read an adapter folder. Raises CheckpointError where it is not a plain LoRA adapter in PEFT's layout."""
    path = Path(folder)
    try:
        config = json.loads(read_bounded_text(path / CONFIG, SETTINGS))
        open_regular(path / WEIGHTS).close()
        tensors = load_file(path / WEIGHTS)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: not an adapter in PEFT's layout ({CONFIG} and {WEIGHTS}): {str(error).partition(chr(10))[0]}"
        ) from None
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path / CONFIG}: peft_type: got {config.get('peft_type')!r}; allowed: LORA")
    if other := [name for name in _UNSUPPORTED if config.get(name)]:
        raise CheckpointError(f"{path / CONFIG}: {other[0]} is set, which is not supported; only plain LoRA is")
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    modules = {_module_of(name, path) for name in tensors}
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    for module in sorted(modules):
        pair = [tensors.get(f"{_PREFIX}{module}.lora_{letter}.weight") for letter in "AB"]
        if pair[0] is None or pair[1] is None or len(pair[0]) != pair[1].shape[1]:
            raise CheckpointError(f"{path / WEIGHTS}: {module} needs lora_A [r, I] and lora_B [O, r]")
        matrices[module] = pair[0], pair[1]
    return Adapter(scale, matrices)


@torch.no_grad()
def merge(model: Glm5, folder: str | Path) -> int:
    """Add an adapter to the weights of `model` in place; returns the number of changed matrices.

    Raises CheckpointError, before anything is changed, for a module that the model lacks or that cannot be merged.
    """
    adapter = read_adapter(folder)
    found = {name: _target(model, name, pair, folder) for name, pair in adapter.matrices.items()}
    for name, (a, b) in adapter.matrices.items():
        linear = found[name]
        weight = linear.dense(torch.float32)
        weight += adapter.scale * (b.to(weight.device).float() @ a.to(weight.device).float())
        if isinstance(linear, Linear):
            linear.weight.copy_(weight)
        else:
            quantized = quantize_blocks(weight)
            linear.weight.copy_(quantized.data)
            linear.weight_scale_inv.copy_(quantized.scale)
    return len(found)


def _module_of(name: str, path: Path) -> str:
    module, _, leaf = name.removeprefix(_PREFIX).rpartition(".lora_")
    if not name.startswith(_PREFIX) or leaf not in ("A.weight", "B.weight"):
        raise CheckpointError(f"{path / WEIGHTS}: {name} is not a matrix of a LoRA adapter")
    return module


def _target(model: Glm5, name: str, pair: Sequence[Tensor], folder: str | Path) -> Linear | BlockScaledLinear:
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        raise CheckpointError(f"{folder}: {name} is not a module of this model") from None
    if not isinstance(linear, Linear | BlockScaledLinear):
        raise CheckpointError(
            f"{folder}: {name} is {type(linear).__name__} in this model, which cannot be merged into; merge into the "
            "checkpoint from before quantization, and quantize the result"
        )
    got, wanted = (pair[1].shape[0], pair[0].shape[1]), tuple(linear.weight.shape)
    if got != wanted:
        raise CheckpointError(f"{folder}: {name} is {list(got)} in the adapter and {list(wanted)} in the model")
    return linear
