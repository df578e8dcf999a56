"""Weights go into a model in use bucket by bucket: bit for bit those of a checkpoint, and nothing wrong unnoticed."""

from pathlib import Path
from traceback import clear_frames

import numpy as np
import pytest
import torch

from glm5.checkpoint import handover
from glm5.checkpoint.handover import NUM_BUFFERS, Buffers, TensorStream
from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.checkpoint.sums import PART_BYTES, checksum
from glm5.checkpoint.writer import TensorLayout
from glm5.common.errors import CheckpointError
from glm5.parallel.table import Shard
from tests.support.checkpoints import ragged, read_tensors
from tests.support.models import random_model
from tests.support.pushes import Sender, same_bits


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differing(before, after):
    return {name for name in before if not torch.equal(before[name].float(), after[name].float())}


def layers_of(bucket) -> set[int]:
    return {handover.place_of(layout.name).layer_idx for layout, _ in bucket}


@pytest.mark.parametrize("names", ["those of the model", "those on disk"])
def test_all_weights_arrive_in_place_in_buckets_of_a_layer(names, tmp_path):
    model, new = random_model(1), random_model(2)
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    tensors = new.state_dict() if names == "those of the model" else read_tensors(save(new, tmp_path / "new"))
    sender = Sender(model, dict(reversed(tensors.items())))
    assert all(len(layers_of(bucket)) == 1 for bucket in sender.buckets)
    assert len(sender.buckets) == model.cfg.num_hidden_layers + 2  # the MTP layer, and what is outside of layers
    assert sender.size < sum(tensor.nbytes for tensor in tensors.values()) / 2
    assert sender.push.is_complete
    sender.send_all()
    assert same_bits(model, new)
    assert places == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def test_buckets_are_small_but_hold_whole_modules(monkeypatch):
    monkeypatch.setattr(handover, "MAX_BUCKET_BYTES", 10_000)
    model, new = random_model(1), random_model(2)
    sender = Sender(model, new.state_dict())
    per_bucket = [sum(layout.num_bytes for layout, _ in bucket) for bucket in sender.buckets]
    modules = [{layout.name.rpartition(".")[0] for layout, _ in bucket} for bucket in sender.buckets]
    assert all(size <= 10_000 or len(one) == 1 for size, one in zip(per_bucket, modules, strict=True))
    assert sum(map(len, modules)) == len(set().union(*modules))
    sender.send_all()
    assert same_bits(model, new)


def test_one_expert_alone():
    model = random_model(1)
    before, expert = weights_of(model), torch.ones(32, 64)
    sender = Sender(model, {"model.layers.1.mlp.experts.3.up_proj.weight": expert})
    assert not sender.push.is_complete
    sender.send_all()
    after, name = weights_of(model), "model.layers.1.mlp.experts.gate_up_proj"
    assert differing(before, after) == {name}
    assert torch.equal(after[name][3, 32:], expert)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("float32", 1),
        pytest.param("float32", 2, marks=pytest.mark.slow),
        pytest.param("bfloat16", 1, marks=pytest.mark.slow),
        ("bfloat16", 2),
    ],
)
def test_floats_for_an_fp8_model_are_quantized_as_offline(tmp_path, size, given):
    """By every rank, and as `save` and `glm5 convert` do."""
    cfg = random_model(1).cfg.replace(hidden_size=256, moe_intermediate_size=256, intermediate_size=256)
    new = random_model(2, cfg).to(getattr(torch, given))
    folders = [save(one, tmp_path / name, dtype="fp8") for name, one in (("old", random_model(1, cfg)), ("new", new))]
    for rank in range(size):
        old, want = (load(folder, shard=Shard(rank, size)) for folder in folders)
        assert any(tensor.dtype == torch.float8_e4m3fn for tensor in old.state_dict().values())
        sender = Sender(old, new.state_dict(), Shard(rank, size))
        sender.send_all()
        assert same_bits(old, want)


def test_fp8_for_an_fp8_model_and_for_a_dense_one(tmp_path):
    folders = [save(random_model(seed, ragged()), tmp_path / str(seed), dtype="fp8") for seed in (1, 2)]
    for dtype in ("auto", "float32"):
        old, want = (load(folder, dtype=dtype) for folder in folders)
        Sender(old, load(folders[1]).state_dict()).send_all()
        assert same_bits(old, want)


def set_nan(tensors):
    tensors["model.layers.1.mlp.experts.gate_up_proj"][3, 5, 7] = float("nan")


def set_infinity(tensors):
    tensors["model.norm.weight"][0] = float("inf")


def reshape(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"][1:]


def rename(tensors):
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors.pop("model.layers.0.self_attn.q_a_proj.weight")


def make_integers(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)


def make_complex(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.complex64)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (set_nan, r"experts.3.gate_proj.weight holds NaN or infinity; nothing was replaced"),
        (set_infinity, "model.norm.weight holds NaN"),
        (reshape, "the update does not fit the model in use: 1 mis-shaped tensor"),
        (rename, "1 unexpected tensor"),
        (make_integers, "1 unreadable tensor"),
        (make_complex, "model.norm.weight is torch.complex64; allowed: "),
        (lambda tensors: tensors.clear(), "no tensors were given"),
        (lambda tensors: tensors.update({"model.norm.weight": 5}), "model.norm.weight': 5; allowed: tensors by name"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(damage, reason):
    model, tensors = random_model(1), dict(random_model(2).state_dict())
    damage(tensors)
    with pytest.raises(CheckpointError, match=reason):
        Sender(model, tensors)
    assert same_bits(model, random_model(1))


def test_a_bucket_with_a_wrong_checksum_is_not_written():
    model = random_model(1)
    sender = Sender(model, random_model(2).state_dict())
    sender.send(0)
    before = weights_of(model)
    with pytest.raises(CheckpointError, match=r"bucket 2 of \d, from model.layers.0.* arrived with a wrong checksum"):
        sender.send(1, damage=True)
    assert not differing(before, weights_of(model))
    assert differing(before, weights_of(random_model(1)))


def test_a_failed_push_does_not_hold_the_senders_memory():
    sender = Sender(random_model(1), random_model(2).state_dict())
    before = Path("/proc/self/maps").read_text().count("glm5-push")
    sender.send(0)
    with pytest.raises(CheckpointError, match="wrong checksum") as failed:
        sender.send(1, damage=True)
    clear_frames(failed.tb)
    assert before == NUM_BUFFERS
    assert Path("/proc/self/maps").read_text().count("glm5-push") == before


def test_what_becomes_infinite_in_the_models_dtype_is_noticed():
    model = random_model(1).to(torch.float16)
    sender = Sender(model, {"model.norm.weight": torch.full((64,), 1e5)})
    with pytest.raises(CheckpointError, match=r"1 tensor \(model.norm.weight\) of the update would hold NaN"):
        sender.send(0)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [([], "the tensors ended before x"), ([torch.ones(3)], r"x is torch.float32 \[3\], announced: .*shape=\(2,\)")],
)
def test_tensors_that_are_not_as_announced(tensors, reason):
    buffers = Buffers(64)
    with pytest.raises(CheckpointError, match=reason):
        buffers.fill(0, [(TensorLayout("x", "F32", (2,)), 0)], iter(tensors))


def test_parts_of_a_module_in_several_buckets_are_refused():
    """Its scales might be gone when its codes are read."""
    names = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight_scale_inv"]
    stream = TensorStream([TensorLayout(name, "F32", (1, 1)) for name in names], [])
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.up_proj in several buckets"):
        Sender(random_model(1), stream)


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr(handover.host_memory, "available", lambda: 100)
    with pytest.raises(CheckpointError, match="2 buffers of 64 bytes each, and the host has 100 bytes of memory"):
        Buffers(64)


def test_a_checksum_knows_the_order_of_its_parts():
    given = [torch.full((PART_BYTES,), value, dtype=torch.uint8) for value in (1, 2)]
    assert checksum(torch.cat(given)) != checksum(torch.cat(given[::-1]))


@pytest.mark.parametrize("size", [1, PART_BYTES, 9 * PART_BYTES + 3])
def test_a_checksum_knows_every_bit(size, seed):
    data = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))
    want = checksum(data)
    assert checksum(data.clone()) == want
    for place in {0, size // 2, size - 1}:
        data[place] ^= 1
        assert checksum(data) != want
        data[place] ^= 1
