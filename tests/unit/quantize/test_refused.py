"""What this engine cannot honour is refused by its name; parts of quantized matrices; weights that are replaced."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from glm5.checkpoint.dummy import dummy
from glm5.checkpoint.formats import stored_of
from glm5.checkpoint.inspect import inspect
from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.checkpoint.stored import weight_formats
from glm5.checkpoint.update import read_all, replace, stage
from glm5.common.errors import CheckpointError, ConfigError
from glm5.config.model import ModelConfig
from glm5.config.quantize import QuantizeConfig
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat
from glm5.model.experts import BlockScaledExperts, QuantizedExperts
from glm5.model.linear import BlockScaledLinear, QuantizedLinear
from glm5.parallel.table import Shard, Span, span_of
from glm5.quantize.run import quantize
from tests.support.checkpoints import edit_json, edit_tensors

IDS = list(range(3, 23))
# w4a8 without rotation and searches.
W4A8 = """
[[process]]
type = "linear_quant"
include = ["*self_attn*", "*mlp*"]
exclude = ["model.layers.{mtp}.*", "*kv_b_proj", "*wk", "*weights_proj", "*gate", "*mlp.experts.*"]
qconfig.act = { scope = "per_token", dtype = "int8" }
qconfig.weight = { scope = "per_channel", dtype = "int8", method = "minmax" }
[[process]]
type = "linear_quant"
include = ["*mlp.experts.*"]
exclude = ["model.layers.{mtp}.*"]
qconfig.act = { scope = "per_token", dtype = "int8" }
qconfig.weight = { scope = "per_channel", dtype = "int4", method = "minmax" }
"""
RECIPES = {
    "w8a8": {"scheme": "w8a8", "target": "glm5"},
    "w4a8": {"recipe": "", "target": "glm5"},
    "w4a16 vllm": {"scheme": "w4a16", "target": "vllm", "method": "minmax"},
    "w8a8 ascend": {"scheme": "w8a8", "target": "ascend"},
    "nvfp4": {"scheme": "nvfp4", "target": "glm5"},
    "nvfp4 vllm": {"scheme": "nvfp4", "target": "vllm"},
}


@pytest.fixture(scope="module")
def written(small_bf16, tmp_path_factory):
    """Quantized checkpoints of one model, by name, made when asked for and never to be written to."""
    root, made = tmp_path_factory.mktemp("refused"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            settings = {"num_samples": 2, "sample_len": 16, "device": "cpu", "min_tokens": 1, "held_out_tokens": 0}
            settings |= {"model": str(small_bf16), "out": str(root / name.replace(" ", "-"))}
            settings |= RECIPES[name]
            if "recipe" in settings:
                settings["recipe"] = str(root / "w4a8.toml")
                (root / "w4a8.toml").write_text(W4A8)
            made[name] = quantize(QuantizeConfig.model_validate(settings))
        return made[name]

    return get


def copied(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to / "copy"))


def edit(path: Path, change: dict) -> None:
    held = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_json(path / "config.json", quantization_config=held | change)


def test_schemes_without_a_reader(written):
    with pytest.raises(CheckpointError, match=r"quant_model_description.json.*AscendV1.*glm5 quantize --target glm5"):
        load(written("w8a8 ascend"))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 vllm"])
def test_nvfp4_has_no_kernel_on_a_gpu_and_runs_by_its_values_on_a_cpu(written, name):
    cfg = ModelConfig.from_file(written(name))
    with pytest.raises(ConfigError, match=r"nvfp4 per group of 16 with inputs in 16 bits have no kernel"):
        weight_formats(stored_of(cfg), cfg, torch.device("cuda"))
    model = load(written(name))
    assert model.cfg.quantization_config is None
    assert torch.equal(model.logits(IDS), load(written(name), dtype=model.dtype).logits(IDS))
    quantized = model.model.layers[1].mlp.experts.down_proj[0].double()
    assert len(quantized[0, :16].abs().unique()) <= 8  # magnitudes of FP4 under one scale


def test_other_algorithms_of_modelopt_are_refused(written, tmp_path):
    path = copied(written("nvfp4 vllm"), tmp_path)
    edit(path, {"quant_algo": "FP8"})
    with pytest.raises(ConfigError, match="quant_algo: got 'FP8'; allowed: NVFP4"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method: got 'gptq'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme.*--kv-cache-dtype"),
        ({"config_groups": {}}, "config_groups: got"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 4}}}}, "format: got"),
        (
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4}}}, "format": "x"},
            "format: got 'x'; allowed: pack-quantized",
        ),
        ({"ignore": ["re:("]}, r"quantization_config: got 're:\('; allowed: regular expressions: missing \)"),
        ({"ignore": "lm_head"}, "ignore: got 'lm_head'; allowed: a list of names"),
        ({"ignore": []}, "kv_b_proj: rows of 32 do not divide into groups"),
    ],
    ids=str,
)
def test_configs_that_say_something_else(written, tmp_path, change, message):
    path = copied(written("w4a16 vllm"), tmp_path)
    edit(path, change)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load(path)


def test_own_configs_that_are_damaged(written, tmp_path):
    path = copied(written("w8a8"), tmp_path)
    for change, message in (
        ({"version": 2}, "version: got 2"),
        ({"schemes": {}}, "is damaged: KeyError"),
        ({"modules": {"model.layers.1.mlp.experts.*.side_proj": "w8a8"}}, "side_proj is no module of this model"),
    ):
        held = json.loads((path / "config.json").read_text())
        edit(path, change)
        with pytest.raises(ConfigError, match=message):
            load(path)
        (path / "config.json").write_text(json.dumps(held))


def test_files_that_do_not_fit(written, tmp_path):
    path, module = copied(written("w8a8"), tmp_path), "model.layers.1.self_attn.o_proj"
    wrong = {f"{module}.weight": torch.zeros(3, 3, dtype=torch.int8)}
    edit_tensors(path, lambda held: (held.pop(f"{module}.weight_scale"), held.update(wrong)))
    with pytest.raises(
        CheckpointError, match=r"missing tensor \(.*o_proj.weight_scale.*mis-shaped tensor \(.*got \[3, 3\]"
    ):
        load(path)
    assert not inspect(path).loads
    with pytest.raises(CheckpointError, match="is quantized already"):
        quantize(QuantizeConfig(model=str(written("w8a8")), out=str(tmp_path / "out")))
    with pytest.raises(CheckpointError, match="as codes"):
        save(load(written("w8a8")), tmp_path / "out")


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "w4a16 vllm"])
def test_a_rank_reads_its_part(written, name):
    if name == "w4a16 vllm":
        with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 2, which cuts .*no multiple of 128"):
            load(written(name), shard=Shard(1, 2))
        return
    whole = load(written(name)).state_dict()
    for rank in range(2):
        part = load(written(name), shard=Shard(rank, 2)).state_dict()
        for layer in (0, 1):
            for leaf in ("self_attn.q_b_proj", "self_attn.o_proj", "mlp.shared_experts.down_proj", "mlp.down_proj"):
                key = f"model.layers.{layer}.{leaf}"
                if f"{key}.weight_scale" not in whole:
                    continue
                span = span_of(f"{key}.weight", tuple(whole[f"{key}.weight"].shape), Shard(rank, 2))
                assert isinstance(span, Span)
                want = whole[f"{key}.weight"].narrow(span.dim, span.start, span.stop - span.start)
                assert torch.equal(part[f"{key}.weight"], want)
                scale = whole[f"{key}.weight_scale"]
                assert torch.equal(part[f"{key}.weight_scale"], scale.chunk(2)[rank] if span.dim == 0 else scale)
        key = "model.layers.1.mlp.experts"
        half = whole[f"{key}.down_proj"].shape[2] // 2
        assert torch.equal(part[f"{key}.down_proj"], whole[f"{key}.down_proj"][..., rank * half : (rank + 1) * half])
        gate, up = (each.chunk(2, dim=1)[rank] for each in whole[f"{key}.gate_up_proj_scale"].chunk(2, dim=1))
        assert torch.equal(part[f"{key}.gate_up_proj_scale"], torch.cat([gate, up], dim=1))


def test_weights_are_replaced_by_such_of_their_scheme(written, small_bf16, tmp_path):
    path = written("w4a8")
    model = load(path)
    before, codes = model.logits(IDS), model.state_dict()["model.layers.1.mlp.experts.down_proj"]
    changed, name = copied(path, tmp_path), "model.layers.1.mlp.experts.2.down_proj.weight_scale"
    edit_tensors(changed, lambda held: held.update({name: torch.full((128, 1), 0.25)}))
    replace(model, stage(model, changed))
    assert model.state_dict()["model.layers.1.mlp.experts.down_proj_scale"][2].eq(0.25).all()
    assert not torch.equal(model.logits(IDS), before)
    assert model.state_dict()["model.layers.1.mlp.experts.down_proj"].data_ptr() == codes.data_ptr()
    read_all(model, path)
    assert torch.equal(model.logits(IDS), before)
    replace(model, stage(model, changed))
    replace(model, stage(model, small_bf16))  # floats, from which the codes were made
    assert torch.equal(model.logits(IDS), before)


def test_random_weights_of_a_scheme(written):
    cfg = ModelConfig.from_file(written("w4a8"))
    model = dummy(cfg, fp8=True)
    kinds = {type(module) for module in model.modules()}
    assert {QuantizedLinear, QuantizedExperts} <= kinds
    assert not {BlockScaledLinear, BlockScaledExperts} & kinds
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert experts.format == WeightFormat("int4", None, "int8")
    assert model.logits(IDS).float().std() > 0.1
    values = QuantizedWeight(experts.gate_up_proj, experts.gate_up_proj_scale, experts.format).values(torch.int8)
    assert (values.min(), values.max()) == (-7, 7)  # a mean of half a code would drive all tokens to the same experts
    other = dummy(cfg.replace(quantization_config={"quant_method": "w4afp8"}), fp8=True)
    assert {BlockScaledLinear, QuantizedExperts} <= {type(module) for module in other.modules()}
    assert other.logits(IDS).isfinite().all()
