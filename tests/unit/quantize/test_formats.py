"""Every format against a reader that shares no code with it: the library's, or numpy's by the format's description."""

import json
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from glm5.checkpoint.formats import FORMATS
from glm5.checkpoint.formats.compressed import two_level_scale
from glm5.checkpoint.formats.packing import (
    pack_int32,
    pack_pairs,
    pack_rows,
    unpack_int32,
    unpack_pairs,
    unpack_rows,
)
from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.common.errors import ConfigError
from glm5.config.quantize import QuantizeConfig, Target
from glm5.config.tensors import tensor_specs
from glm5.quant.minmax import minmax
from glm5.quant.record import INT4_GROUP
from glm5.quantize.job import prepare
from glm5.quantize.run import quantize
from glm5.testing.numerics import rel_rms
from tests.support.checkpoints import read_tensors

BRIEF = {"num_samples": 3, "sample_len": 24, "device": "cpu", "min_tokens": 2, "held_out_tokens": 0}
EXPERT = "model.layers.1.mlp.experts.3."
Q_A = "model.layers.1.self_attn.q_a_proj."


class Written:
    """A checkpoint that was written, and what was meant: the values of every quantized module."""

    def __init__(self, model: Path, out: Path, **settings: object) -> None:
        given = QuantizeConfig.model_validate({"model": str(model), "out": str(out), **BRIEF, **settings})
        self.job = prepare(given)
        self.path = quantize(given)
        self.tensors = read_tensors(self.path)
        self.config = json.loads((self.path / "config.json").read_text()).get("quantization_config")


@pytest.fixture(scope="module")
def written(small_bf16, tmp_path_factory):
    """By settings, each once."""
    made: dict[str, Written] = {}

    def get(**settings: object) -> Written:
        key = str(settings)
        if key not in made:
            made[key] = Written(small_bf16, tmp_path_factory.mktemp("written") / "out", **settings)
        return made[key]

    return get


def int4_of(packed: Tensor) -> np.ndarray:
    """Two's complement nibbles, the low one first."""
    byte = packed.view(torch.uint8).numpy()
    both = np.stack([byte & 15, byte >> 4], -1).reshape(*byte.shape[:-1], -1).astype(int)
    return np.where(both > 7, both - 16, both)


def test_every_target_has_a_format_and_every_format_its_row_in_the_documents():
    assert {target for each in FORMATS for target in each.targets} == set(get_args(Target))
    docs = Path(__file__).parents[3] / "docs"
    table = (docs / "checkpoints.md").read_text().partition("| `quant_method`")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == {each.name for each in FORMATS if each.is_loaded}


@pytest.mark.parametrize("shape", [(2, 8), (3, 6, 16), (4, 2, 128)])
def test_packing_is_undone(shape):
    codes = torch.randint(-8, 8, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(len(shape)))
    assert torch.equal(unpack_pairs(pack_pairs(codes)), codes)
    assert torch.equal(unpack_pairs(pack_pairs(codes & 15), signed=False), codes & 15)
    assert torch.equal(unpack_rows(pack_rows(codes)), codes)
    if shape[-1] % 8 == 0:
        assert torch.equal(unpack_int32(pack_int32(codes)), codes)


def test_what_cannot_be_packed_is_said():
    with pytest.raises(ConfigError, match="a row of 7 4-bit codes cannot be packed 2 at a time"):
        pack_pairs(torch.zeros(2, 7, dtype=torch.int8))


GROUPS_OF_64 = str(Path(__file__).parent / "groups-of-64.toml")
VLLM = [
    {"scheme": "w8a8", "target": "vllm"},
    {"scheme": "w4a16", "target": "vllm"},
    {"scheme": "w4a8", "target": "vllm"},
    {"scheme": "w4a8", "target": "vllm", "mtp": "drop"},
    {"scheme": "w4a16", "target": "sglang"},
    {"recipe": GROUPS_OF_64, "target": "vllm"},
    {"scheme": "nvfp4-fp8", "target": "vllm"},
]


@pytest.mark.parametrize("settings", VLLM, ids=str)
def test_compressed_tensors_reads_every_module(written, settings):
    """The library undoes what was written, and packs it again to the same bytes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    made = written(**settings)
    config = QuantizationConfig.model_validate(made.config)
    num_modules = 0
    for module, group in library_groups(made).items():
        if group is None:
            continue
        scheme = config.config_groups[group]
        held = {
            name: made.tensors[f"{module}.{name}"]
            for name in ("weight_packed", "weight", "weight_scale", "weight_shape", "weight_global_scale")
            if f"{module}.{name}" in made.tensors
        }
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        meant = made.job.stored(module).read(made.tensors.__getitem__)
        wide = {**held, "weight_scale": held["weight_scale"].float()}
        value = compressor.decompress(wide, scheme)["weight"]
        assert torch.equal(value.float(), meant.dequantize(torch.float32)), module
        scales = {name: tensor for name, tensor in wide.items() if name.endswith("scale")}
        again = compressor.compress({"weight": value.float(), **scales}, scheme)
        if scheme.format == "nvfp4-pack-quantized":  # whose zeros have signs
            repeated = compressor.decompress({**again, **scales}, scheme)["weight"]
            assert torch.equal(repeated.float(), value.float()), module
        for part in ("weight_packed", "weight"):
            if part in held and scheme.format != "nvfp4-pack-quantized":
                assert torch.equal(again[part].view(torch.uint8), held[part].view(torch.uint8)), (module, part)
        num_modules += 1
    assert num_modules > 40


def layer_and_name(module: str) -> tuple[int, str]:
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
    assert found
    return int(found[1]), re.sub(r"experts\.\d+\.", "experts.*.", found[2])


def library_groups(made: Written) -> dict[str, str | None]:
    """For each linear module, fused or not, which group the library's matching gives it."""
    from compressed_tensors.utils.match import is_match

    found: dict[str, str | None] = {}
    linear = torch.nn.Linear(1, 1)
    for spec in tensor_specs(made.job.cfg):
        module = spec.name.removesuffix(".weight")
        if len(spec.shape) != 2 or module.endswith("embed_tokens"):
            continue
        ignored = is_match(module, linear, made.config["ignore"])
        groups = [
            name for name, group in made.config["config_groups"].items() if is_match(module, linear, group["targets"])
        ]
        assert ignored or len(groups) == 1, f"{module}: {groups}"
        found[module] = None if ignored else groups[0]
    return found


@pytest.mark.parametrize("settings", VLLM, ids=str)
def test_patterns_say_what_the_plan_says_and_obey_vllms_fusions(written, settings):
    made = written(**settings)
    groups = library_groups(made)
    for module, group in groups.items():
        layer = layer_and_name(module) if module.startswith("model.layers.") else (-1, module)
        planned = made.job.run.plan.layer(layer[0]).get(layer[1])
        assert (group is None) == (planned is None), module
        if module.endswith((".gate", "kv_b_proj", "indexer.wk", "indexer.weights_proj", "lm_head")):
            assert group is None, module
    # What vLLM merges into one product (deepseek_v2.py): parts by their own names, all in one group or all ignored.
    for one, other in (("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")):
        for module in groups:
            if module.endswith(one):
                assert groups[module] == groups[module.removesuffix(one) + other], module
    experts = {group for module, group in groups.items() if ".layers.2.mlp.experts." in module}
    assert len(experts) == 1


def test_vllms_conversion_of_scales_loses_nothing():
    """convert_bf16_scales_to_fp8: rows in e4m3 by their largest, an eighth of that, and a float32 a row."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 64)[:, None]
    exact, _ = minmax(weight, INT4_GROUP)
    worst = {}
    for name, scale in (("ours", two_level_scale(exact)), ("plain", exact)):
        stored = scale.to(torch.bfloat16)
        assert name == "plain" or torch.equal(stored.float(), scale)
        row = stored.float().amax(-1, keepdim=True) / 448
        eighth = ((stored.float() / row).to(torch.float8_e4m3fn).float() / 8).to(torch.float8_e4m3fn)
        used = eighth.float() * row * 8
        worst[name] = ((used - stored.float()) / stored.float()).abs().max().item()
    assert worst["ours"] <= 2**-8  # bfloat16's rounding of a product
    assert worst["plain"] > 2**-6  # the control: e4m3's


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("settings", [{"scheme": "w4a16"}, {"scheme": "w4a8"}, {"recipe": GROUPS_OF_64}], ids=str)
def test_transformers_gives_the_logits_of_our_dequantized_weights(written, settings):
    """Of what it loads: int8 experts, and NVFP4 beside FP8, end with an error of its conversion."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    made = written(**settings, target="vllm")
    config = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(made.path, quantization_config=config, dtype=torch.float32).float()
    ours, before = load(made.path, dtype="float32"), load(made.job.source.directory, dtype="float32")
    for name, parameter in ours.named_parameters():
        if ".experts." in name:  # come in bfloat16, the type of their scales, whatever dtype is asked for
            parameter.data.copy_(parameter.bfloat16())
    ids = torch.randint(0, 320, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = theirs(ids).logits, ours.logits(ids)
    assert rel_rms(got, want) < 1e-5  # transformers sums in another order
    assert rel_rms(before.logits(ids), want) > 1e-2  # the control: what quantization did


def test_w4afp8(written):
    made = written(scheme="w4a8", target="sglang")
    assert made.config == {"quant_method": "w4afp8"}
    codes = int4_of(made.tensors[f"{EXPERT}down_proj.weight"])
    assert made.tensors[f"{EXPERT}down_proj.weight"].dtype == torch.int8
    scale = made.tensors[f"{EXPERT}down_proj.weight_scale_inv"]
    assert torch.equal(scale, scale.bfloat16().float())
    assert made.tensors[f"{EXPERT}down_proj.input_scale"].shape == (1,)
    assert 0 < made.tensors[f"{EXPERT}down_proj.input_scale"].item() < 1
    source = made.job.source.layer(1)
    assert_near(codes * scale.numpy().repeat(128, -1), source["mlp.experts.*.down_proj.weight"][3], most=0.2)
    o_proj = "model.layers.1.self_attn.o_proj"
    weight, grid = made.tensors[f"{o_proj}.weight"].float(), made.tensors[f"{o_proj}.weight_scale_inv"]
    assert grid.shape == (1, 1)
    assert_near((weight * grid[0, 0]).double().numpy(), source["self_attn.o_proj.weight"], most=0.05)


def assert_near(value: np.ndarray, weight: Tensor, most: float) -> None:
    """Relative RMS of columns that smoothing has left their direction: each is the weight's, times something."""
    want = weight.double().numpy()
    assert value.shape == want.shape
    cosines = (value * want).sum(0) / np.sqrt((value**2).sum(0) * (want**2).sum(0))
    assert np.sqrt(1 - np.median(cosines) ** 2) < most


def test_native_fp8_is_what_saving_a_model_as_fp8_gives(written, tmp_path):
    made = written(scheme="fp8", target="glm5")
    save(load(made.job.source.directory), tmp_path / "saved", dtype="fp8")
    saved = read_tensors(tmp_path / "saved")
    assert made.tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(made.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert made.config == json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]


def test_modelopt_nvfp4(written):
    made = written(scheme="nvfp4", target="vllm")
    assert (made.path / "hf_quant_config.json").is_file()
    byte = made.tensors[f"{EXPERT}up_proj.weight"].numpy()
    assert byte.dtype == np.uint8
    nibbles = np.stack([byte & 15, byte >> 4], -1).reshape(128, 128)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    scale = made.tensors[f"{EXPERT}up_proj.weight_scale"].float().numpy().repeat(16, -1)
    whole = made.tensors[f"{EXPERT}up_proj.weight_scale_2"]
    assert torch.equal(whole, made.tensors[f"{EXPERT}gate_proj.weight_scale_2"])  # engines compute both at once
    value = levels[nibbles] * scale * whole.item()
    want = made.job.source.layer(1)["mlp.experts.*.up_proj.weight"][3].float().numpy()
    error = np.sqrt(((value - want) ** 2).sum() / (want**2).sum())
    assert 0.05 < error < 0.12  # e2m1 in groups of 16


def test_ascend_bytes(written):
    """Neighbouring outputs a byte; scale_bias gives back what the kernel's split of int8 inputs takes away."""
    made = written(scheme="w4a8", target="ascend")
    assert made.config is None
    files = {path.name for path in made.path.iterdir()}
    assert "quant_model_weights-00001-of-00005.safetensors" in files
    assert "quant_model_weights.safetensors.index.json" in files
    described = json.loads((made.path / "quant_model_description.json").read_text())
    assert described["model_quant_type"] == "W4A8_DYNAMIC"
    assert described[f"{EXPERT}up_proj.weight"] == "W4A8_DYNAMIC"
    assert described[f"{Q_A}weight"] == "W8A8_DYNAMIC"
    assert described["model.layers.1.mlp.gate.weight"] == "FLOAT"
    assert set(made.tensors) <= set(described)
    for name, slices in (("up_proj", 1), ("down_proj", 16)):
        packed = made.tensors[f"{EXPERT}{name}.weight"]
        assert packed.dtype == torch.int8
        assert packed.shape == (64, 128)
        byte = packed.numpy().view(np.uint8)
        rows = np.stack([byte & 15, byte >> 4], 1).reshape(128, 128).astype(int)
        codes = np.where(rows > 7, rows - 16, rows)
        scale = made.tensors[f"{EXPERT}{name}.weight_scale"].numpy()
        bias = made.tensors[f"{EXPERT}{name}.scale_bias"].numpy()
        assert bias.shape == (128, slices)
        np.testing.assert_allclose(bias, 8 * (codes * scale).reshape(128, slices, -1).sum(-1), rtol=1e-5, atol=1e-4)
        # The kernel's arithmetic: a = 16 high + low + 8 with signed halves.
        a = np.random.default_rng(0).integers(-128, 128, 128)
        high, low = np.floor_divide(a, 16), np.mod(a, 16) - 8
        assert np.array_equal(16 * high + low + 8, a)
        split = (codes @ (16 * high) + codes @ low) * scale[:, 0] + bias.sum(-1)
        np.testing.assert_allclose(split, codes @ a * scale[:, 0], rtol=1e-4, atol=1e-2)
        assert not made.tensors[f"{EXPERT}{name}.weight_offset"].any()
    assert described["is_rot_used"] is True
    assert load_file(made.path / "rot.safetensors").keys() == {"rot.weight"}
    turn = made.job.run.rotations["residual"].matrix()
    norm = made.job.source.layer(-1)["model.norm.weight"].double()
    torch.testing.assert_close(made.tensors["rot.weight"].double(), turn.T @ norm.diag() @ turn, rtol=1e-5, atol=1e-6)
    assert made.tensors["model.layers.3.shared_head.head.weight"].shape == (320, 128)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheme": "fp8", "target": "ascend"}, "AscendV1 holds int8 and int4 per channel"),
        ({"scheme": "nvfp4", "target": "ascend"}, "nvfp4: vllm-ascend loads nvfp4 .* on GPUs alone"),
        ({"scheme": "nvfp4-fp8", "target": "ascend"}, "AscendV1 holds int8 and int4 per channel"),
        ({"scheme": "w8a8", "target": "sglang"}, "sglang has no kernel for experts in w8a8"),
        ({"recipe": GROUPS_OF_64, "target": "ascend"}, "vllm-ascend take int4 in groups of 128 there, not w4a16-g64"),
    ],
)
def test_what_a_target_cannot_load_is_refused_by_name(small_bf16, tmp_path, settings, words):
    given = {"model": str(small_bf16), "out": str(tmp_path / "out"), **BRIEF, **settings}
    with pytest.raises(ConfigError, match=words):
        quantize(QuantizeConfig.model_validate(given))
    assert not list(tmp_path.iterdir())
