"""Every kind of damaged or misfitting checkpoint: the message a person would want, from `load` and from `inspect`."""

import json
import os

import pytest
import torch

from glm5.checkpoint.inspect import inspect
from glm5.checkpoint.load import load
from glm5.common.errors import CheckpointError, ConfigError
from tests.support.checkpoints import edit_json, edit_tensors, read_tensors, shard_files, write_tensors

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"
WQ_B = "model.layers.0.self_attn.indexer.wq_b.weight"


def truncate(directory):
    os.truncate(shard_files(directory)[2], 30_000)


def cut_header(directory):
    os.truncate(shard_files(directory)[2], 100)


def overwrite_header(directory):
    with shard_files(directory)[2].open("r+b") as file:
        file.seek(20)
        file.write(b"\x00" * 20)


def remove_two_shards(directory):
    for file in shard_files(directory)[2:4]:
        file.unlink()


def remove_index(directory):
    (directory / INDEX).unlink()


def cut_index(directory):
    os.truncate(directory / INDEX, 500)


def empty_index(directory):
    (directory / INDEX).write_text("{}")


def change_map(directory, change):
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def deep_index(directory):
    (directory / INDEX).write_text("[" * 100_000)


def escape_directory(directory):
    change_map(directory, lambda names: names.update({WQ_B: "../other.safetensors"}))


def name_tensor_twice_in_index(directory):
    (directory / INDEX).write_text('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}')


def swap_shards_in_index(directory):
    files = [file.name for file in shard_files(directory)]
    change_map(directory, lambda names: names.update({WQ_B: files[-1]}))


def store_twice(directory):
    tensors = read_tensors(directory)
    write_tensors(directory, tensors, lambda name: int(name == WQ_B))
    (directory / "model-00001-of-00002.safetensors").write_bytes(
        (directory / "model-00002-of-00002.safetensors").read_bytes()
    )


def drop_expert(directory):
    edit_tensors(directory, lambda tensors: tensors.pop(EXPERT))


def drop_seven(directory):
    edit_tensors(directory, lambda tensors: [tensors.pop(name) for name in list(tensors)[:7]])


def add_unknown(directory):
    edit_tensors(directory, lambda tensors: tensors.update({"model.layers.2.extra.weight": torch.ones(2, 3)}))


def add_expert(directory):
    name = EXPERT.replace(".7.", ".8.")
    edit_tensors(directory, lambda tensors: tensors.update({name: tensors[EXPERT].clone()}))


def transpose(directory):
    edit_tensors(directory, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].T.contiguous()}))


def integers(directory):
    edit_tensors(directory, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int8)}))


def wrong_config(directory):
    edit_json(directory / "config.json", q_lora_rank=24)


def no_config(directory):
    (directory / "config.json").unlink()


def drop_scale(directory):
    edit_tensors(directory, lambda tensors: tensors.pop(WQ_B + "_scale_inv"))


def drop_scaled_weight(directory):
    edit_tensors(directory, lambda tensors: tensors.pop(WQ_B))


def cut_scale(directory):
    def edit(tensors):
        tensors[WQ_B + "_scale_inv"] = tensors[WQ_B + "_scale_inv"][:1].clone()

    edit_tensors(directory, edit)


def half_scale(directory):
    edit_tensors(directory, lambda tensors: tensors.update({WQ_B + "_scale_inv": tensors[WQ_B + "_scale_inv"].half()}))


def scale_a_dense_weight(directory):
    edit_tensors(directory, lambda tensors: tensors.update({WQ_B: tensors[WQ_B].bfloat16()}))


def scale_a_norm(directory):
    edit_tensors(directory, lambda tensors: tensors.update({"model.norm.weight_scale_inv": torch.ones(2)}))


def other_float8(directory):
    edit_tensors(directory, lambda tensors: tensors.update({WQ_B: tensors[WQ_B].float().to(torch.float8_e5m2)}))


KINDS = {
    truncate: (
        "bf16",
        r"model-00003-of-\d+\.safetensors: truncated: its header promises \d+ bytes, the file has 30000",
    ),
    cut_header: ("bf16", r"model-00003-of-\d+\.safetensors: truncated: its header alone needs \d+ bytes"),
    overwrite_header: ("bf16", r"model-00003-of-\d+\.safetensors: corrupt: the header cannot be understood"),
    remove_two_shards: ("bf16", r"2 shards \(model-00003-of-\d+\.safetensors, model-00004.*index\.json absent; fetch"),
    remove_index: ("bf16", r"holds neither model\.safetensors\.index\.json nor model\.safetensors; found \d+ other"),
    cut_index: ("bf16", r"index\.json: corrupt: .*; fetch it again"),
    deep_index: ("bf16", r"index\.json: corrupt: maximum recursion depth exceeded"),
    empty_index: ("bf16", r"index\.json: has no weight_map"),
    escape_directory: ("bf16", r"is said to be in '\.\./other\.safetensors', allowed: a \.safetensors file beside it"),
    name_tensor_twice_in_index: ("bf16", r"index\.json: corrupt: 'a' appears twice"),
    swap_shards_in_index: ("bf16", r"1 tensor \(model\.layers\.0\.self_attn\.indexer\.wq_b\.weight in .*\) not where"),
    store_twice: (
        "bf16",
        r"1 tensor \(.*wq_b\.weight in model-00001-of-00002\S* and model-00002-of-00002\S*\) stored twi",
    ),
    drop_expert: ("bf16", r"1 missing tensor \(model\.layers\.2\.mlp\.experts\.7\.up_proj\.weight \[32, 64\]\)"),
    drop_seven: ("bf16", r"7 missing tensors \(.*, .*, .* and 2 more\); glm5 inspect \S+ lists them all"),
    add_unknown: ("bf16", r"1 unexpected tensor \(model\.layers\.2\.extra\.weight \[2, 3\]\)"),
    add_expert: ("bf16", r"1 unexpected tensor \(model\.layers\.2\.mlp\.experts\.8\.up_proj\.weight \[32, 64\]\)"),
    transpose: ("bf16", r"1 mis-shaped tensor \(\S+7\.up_proj\.weight: got \[64, 32\], expected \[32, 64\]\)"),
    integers: (
        "bf16",
        r"1 unreadable tensor \(\S+7\.up_proj\.weight: stored as I8, allowed: BF16, F16, F32, F64 or sca",
    ),
    wrong_config: ("bf16", r"19 mis-shaped tensors \(\S+q_a_proj\.weight: got \[32, 64\], expected \[24, 64\], "),
    drop_scale: ("fp8", r"wq_b\.weight: F8_E4M3 without \S+wq_b\.weight_scale_inv"),
    drop_scaled_weight: ("fp8", r"1 missing tensor \(\S+wq_b\.weight \[256, 136\]\); 1 unreadable .* scales without"),
    cut_scale: ("fp8", r"wq_b\.weight_scale_inv: got \[1, 2\], expected \[2, 2\]"),
    half_scale: ("fp8", r"wq_b\.weight_scale_inv: stored as F16, allowed: F32"),
    scale_a_dense_weight: ("fp8", r"wq_b\.weight: stored as BF16 although it has scales, allowed: F8_E4M3"),
    scale_a_norm: ("fp8", r"model\.norm\.weight: has scales, but is no matrix"),
    other_float8: ("fp8", r"wq_b\.weight: stored as F8_E5M2 although it has scales"),
}


@pytest.mark.parametrize("harm", KINDS, ids=lambda harm: harm.__name__)
def test_load_refuses_and_inspect_reports(harm, request):
    kind, message = KINDS[harm]
    directory = request.getfixturevalue(kind)
    harm(directory)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(directory)
    assert "\n" not in str(raised.value)
    assert str(directory) in str(raised.value)
    report = inspect(directory)
    assert not report.loads
    assert report.fit.problems()


def test_inspect_names_every_damaged_shard_at_once(bf16):
    truncate(bf16)
    shard_files(bf16)[5].unlink()
    damage = inspect(bf16).fit.damage
    assert len(damage) == 2
    assert "model-00006" in damage[0]
    assert "model-00003" in damage[1]


def test_a_checkpoint_without_config(bf16):
    no_config(bf16)
    for read in (load, inspect):
        with pytest.raises(ConfigError, match=r"config\.json: no such file; a checkpoint folder holds a config\.json"):
            read(bf16)


def test_an_empty_directory_of_weights(bf16):
    for file in [*shard_files(bf16), bf16 / INDEX]:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors\.index\.json nor model\.safetensors$"):
        load(bf16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bf16"}, "dtype: got bf16; allowed: auto, bfloat16, float16,"),
        ({"dtype": torch.int8}, "dtype: got torch.int8; allowed: auto"),
        ({"dtype": torch.float8_e4m3fn}, "dtype: got torch.float8_e4m3fn; allowed: auto"),
        ({"device": "cpuu"}, "device: got cpuu; allowed: cpu, or"),
        ({"device": "cuda:77"}, "device: got cuda:77; allowed: cpu, or"),
        ({"lora_norm_eps": -1.0}, "lora_norm_eps: got -1.0; allowed: above 0"),
    ],
)
def test_bad_arguments(originals, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load(originals["bf16"], **arguments)
