"""Fake quantization as its own model: a checkpoint's values in plain modules, inputs through their grids and back."""

from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.formats import format_of, stored_of
from glm5.checkpoint.formats.fp8 import W4aFp8
from glm5.checkpoint.index import scan
from glm5.checkpoint.load import load
from glm5.config.model import ModelConfig
from glm5.model.experts import Experts
from glm5.model.glm5 import Glm5
from glm5.quant.record import FP8_BLOCK, FP8_GROUP, Scheme
from glm5.quantize.layer import FakeQuantizedExperts, FakeQuantizedLinear


def fake_quantized(path: Path, dtype: torch.dtype) -> Glm5:
    """The model of a quantized checkpoint, computed without a single code."""
    model = load(path, dtype=dtype)
    cfg = ModelConfig.from_file(path)
    schemes = {matrix.module: matrix.scheme for matrix in stored_of(cfg).values()}
    if isinstance(format_of(cfg), W4aFp8):
        schemes |= {
            name.removesuffix(".weight_scale_inv"): Scheme(FP8_BLOCK, FP8_GROUP)
            for name in scan(path).entries
            if is_fp8(name)
        }
    for module, scheme in schemes.items():
        if ".experts." not in module:
            linear = model.get_submodule(module)
            assert isinstance(linear.weight, Tensor)
            _put(model, module, FakeQuantizedLinear(linear.weight.detach(), scheme.act))
    for name, experts in list(model.named_modules()):
        if isinstance(experts, Experts) and f"{name}.0.up_proj" in schemes:
            gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
            stacks = {"gate_proj": gate, "up_proj": up, "down_proj": experts.down_proj.detach()}
            acts = [schemes[f"{name}.0.{leaf}"].act for leaf in ("gate_proj", "down_proj")]
            _put(model, name, FakeQuantizedExperts(stacks, *acts))
    return model


def is_fp8(name: str) -> bool:
    """Of w4afp8's tensors: scales of native FP8."""
    return name.endswith(".weight_scale_inv") and ".experts." not in name


def _put(model: Glm5, name: str, module: torch.nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
