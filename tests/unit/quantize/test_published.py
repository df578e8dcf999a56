"""Layouts that others publish, written by the compressed-tensors library: they load, and equal its own values."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import is_match
from safetensors.torch import save_file
from torch import Tensor

from glm5.checkpoint.inspect import inspect
from glm5.checkpoint.load import load
from glm5.checkpoint.names import slot_of
from glm5.checkpoint.save import save
from glm5.model.experts import QuantizedExperts
from glm5.model.linear import BlockScaledLinear, QuantizedLinear
from glm5.testing.numerics import rel_rms
from tests.support.checkpoints import read_tensors
from tests.support.models import random_model
from tests.support.quantized import fake_quantized
from tests.unit.quantize.conftest import small

BUDGET = 1e-6  # as in test_served.py
EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
BLOCK = {"weights": {**FP8, "strategy": "block", "block_structure": [128, 128]}}
BLOCK["input_activations"] = {**FP8, "strategy": "group", "group_size": 128, "dynamic": True}
CHANNEL = {"weights": {**FP8, "strategy": "channel"}}
CHANNEL["input_activations"] = {**FP8, "strategy": "token", "dynamic": True}
W4A8 = {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}}
W4A8["input_activations"] = CHANNEL["input_activations"]
FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
NVFP4 = {"weights": FP4, "input_activations": {**FP4, "dynamic": "local"}}
ELSE = r"re:.*(self_attn\.\w+_proj\w*|indexer\.(wq_b|wk)|(mlp|shared_experts)\.(gate|up|down)_proj)$"
ATTENTION = r"re:.*self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)$"
LAYOUTS = {
    "gpustack's GLM-5.3-W4A8, FP8 in blocks": (
        {"experts": (W4A8, EXPERTS, "pack-quantized"), "rest": (BLOCK, ELSE, "float-quantized")},
        ["lm_head", r"re:.*mlp\.gate$", r"re:.*weights_proj$", r"re:.*eh_proj$"],
    ),
    "gpustack's GLM-5.3-W4A8, FP8 per channel": (
        {"experts": (W4A8, EXPERTS, "pack-quantized"), "rest": (CHANNEL, ELSE, "float-quantized")},
        ["lm_head", r"re:.*mlp\.gate$", r"re:.*weights_proj$", r"re:.*kv_b_proj$", r"re:.*layers\.3\..*"],
    ),
    "FP8 for the class, int4 for a pattern": (
        {"rest": (BLOCK, "Linear", "float-quantized"), "experts": (W4A8, EXPERTS, "pack-quantized")},
        ["lm_head", r"re:.*mlp\.gate$", r"re:.*embed_tokens", r"re:.*weights_proj$", r"re:.*eh_proj$"],
    ),
    "GLM-5.2-FP8-NVFP4": (
        {"attention": (BLOCK, ATTENTION, "float-quantized"), "experts": (NVFP4, EXPERTS, "nvfp4-pack-quantized")},
        ["lm_head", r"re:.*mlp\.gate$", r"re:.*layers\.3\..*"],
    ),
}


def scales_of(weight: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    """By the library from the largest values, as its users' observers do."""
    if args.strategy == "block":
        rows, columns = (-(-size // 128) for size in weight.shape)
        padded = torch.zeros(rows * 128, columns * 128)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        groups = padded.reshape(rows, 128, columns, 128).transpose(1, 2).flatten(2)
    else:
        groups = weight.reshape(len(weight), -1, args.group_size or weight.shape[1])
    if args.strategy == "tensor_group":
        whole = (448 * 6 / weight.abs().amax()).reshape(1)
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
        return {"weight_scale": scale, "weight_global_scale": whole}
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return {"weight_scale": scale.bfloat16().float() if args.num_bits == 4 else scale}


def write(source: Path, out: Path, groups: dict[str, Any], ignore: list[str]) -> dict[str, Tensor]:
    """The checkpoint `source` in a layout; returns the library's values by name."""
    schemes = {
        name: QuantizationScheme(targets=[target], format=form, **args) for name, (args, target, form) in groups.items()
    }
    config = QuantizationConfig(
        config_groups=schemes, ignore=ignore, format="mixed-precision", quantization_status="compressed"
    )
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    linear = torch.nn.Linear(1, 1)
    for name, tensor in read_tensors(source).items():
        module = name.removesuffix(".weight")
        fitting = [s for s in schemes.values() if is_match(module, linear, s.targets)]
        if tensor.dim() != 2 or not fitting or is_match(module, linear, ignore):
            tensors[name] = tensor
            continue
        scheme = min(fitting, key=lambda each: each.targets == ["Linear"])
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        scales = scales_of(tensor.float(), scheme.weights)
        held = compressor.compress({"weight": tensor.float(), **scales}, scheme)
        wide = {**held, "weight_scale": held["weight_scale"].float()}
        values[name] = compressor.decompress(wide, scheme)["weight"].float()
        if scheme.weights.num_bits == 4 and scheme.weights.type == "int":
            held["weight_scale"] = held["weight_scale"].bfloat16()
        if scheme.format == "nvfp4-pack-quantized":
            held["input_global_scale"] = torch.tensor([100.0])
        tensors |= {f"{module}.{part}": each.contiguous() for part, each in held.items()}
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    plain = json.loads((source / "config.json").read_text())
    plain["quantization_config"] = json.loads(config.model_dump_json())
    (out / "config.json").write_text(json.dumps(plain))
    return values


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save(random_model(3, small()), tmp_path_factory.mktemp("published") / "source", dtype="float64")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_loads_and_equals_its_dequantized_weights(layout, source, tmp_path):
    groups, ignore = LAYOUTS[layout]
    values = write(source, tmp_path / "out", groups, ignore)
    assert len(values) > 50
    held = load(tmp_path / "out", dtype="float32").state_dict()
    for name, value in values.items():
        slot = slot_of(name)
        got = slot.view(held[slot.parameter])
        # Of NVFP4 the library's values are products of bfloat16.
        is_fp4 = "NVFP4" in layout and ".experts." in name
        assert torch.allclose(got, value, rtol=2**-7, atol=0) if is_fp4 else torch.equal(got, value), name
    model, ids = load(tmp_path / "out"), torch.arange(20) * 7 % small().vocab_size
    kinds = {type(module) for module in model.modules()}
    assert "FP4" in layout or QuantizedExperts in kinds
    assert (QuantizedLinear if "channel" in layout else BlockScaledLinear) in kinds
    assert inspect(tmp_path / "out").loads
    assert rel_rms(model.logits(ids), fake_quantized(tmp_path / "out", torch.float64).logits(ids)) < BUDGET
