"""Weights of a checkpoint replace a model's: all of them or some, in its formats, and none when anything is wrong."""

import json

import pytest
import torch

from glm5.checkpoint import update
from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.checkpoint.update import identity_of, is_finite, replace, stage
from glm5.common.errors import CheckpointError, ConfigError
from tests.support.checkpoints import edit_json, edit_tensors, ragged, read_tensors, write_tensors
from tests.support.models import random_model

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with other weights than `model`."""
    return save(random_model(2), tmp_path_factory.mktemp("update") / "new")


@pytest.fixture
def changed(folder, tmp_path):
    """A copy of `folder` for a test to damage."""
    out = tmp_path / "changed"
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


@pytest.fixture
def model():
    return random_model(1)


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differing(before, after):
    return {name for name in before if not torch.equal(before[name].float(), after[name].float())}


def test_all_weights_are_replaced_in_place(model, folder):
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    staged = stage(model, folder)
    assert staged.is_complete
    replace(model, staged)
    assert not differing(weights_of(random_model(2)), weights_of(model))
    assert places == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def test_staging_alone_changes_nothing(model, folder):
    before = weights_of(model)
    stage(model, folder)
    assert not differing(before, weights_of(model))


def test_one_expert_alone(model, changed):
    tensors = {EXPERT: read_tensors(changed)[EXPERT]}
    write_tensors(changed, tensors)
    (changed / "config.json").unlink()
    before = weights_of(model)
    staged = stage(model, changed)
    assert not staged.is_complete
    replace(model, staged)
    after = weights_of(model)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert differing(before, after) == {name}
    half = before[name].shape[1] // 2
    assert torch.equal(after[name][3, half:], tensors[EXPERT])
    after[name][3, half:] = before[name][3, half:]
    assert torch.equal(after[name], before[name])


def test_bfloat16_weights_for_a_float32_model(model, tmp_path):
    folder = save(random_model(2), tmp_path / "bf16", dtype="bfloat16")
    replace(model, stage(model, folder))
    assert not differing(weights_of(load(folder, dtype="float32")), weights_of(model))


def test_fp8_weights_for_an_fp8_model_and_for_a_dense_one(tmp_path):
    old = save(random_model(1, ragged()), tmp_path / "old", dtype="fp8")
    new = save(random_model(2, ragged()), tmp_path / "new", dtype="fp8")
    for dtype in ("auto", "float32"):
        model = load(old, dtype=dtype)
        replace(model, stage(model, new))
        assert not differing(weights_of(load(new, dtype=dtype)), weights_of(model)), dtype


def test_dense_weights_for_an_fp8_model_are_quantized(tmp_path):
    model = load(save(random_model(1, ragged()), tmp_path / "old", dtype="fp8"))
    new = random_model(2, ragged())
    replace(model, stage(model, save(new, tmp_path / "new")))
    assert not differing(weights_of(load(save(new, tmp_path / "fp8", dtype="fp8"))), weights_of(model))


def set_nan(tensors):
    tensors[EXPERT][5, 7] = float("nan")


def set_infinity(tensors):
    tensors["model.norm.weight"][0] = float("inf")


def reshape(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"][1:].clone()


def rename(tensors):
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors.pop("model.layers.0.self_attn.q_a_proj.weight")


def make_integers(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (set_nan, r"1 parameter \(model.layers.1.mlp.experts.gate_up_proj\) would hold NaN"),
        (set_infinity, "NaN or infinity"),
        (reshape, "mis-shaped tensor"),
        (rename, "unexpected tensor"),
        (make_integers, "unreadable tensor"),
        (
            lambda tensors: (
                [tensors.pop(name) for name in list(tensors) if name != "x"] and tensors.update(x=torch.ones(1))
            ),
            "unexpected",
        ),
    ],
)
def test_a_wrong_tensor_is_refused(model, changed, damage, reason):
    edit_tensors(changed, damage)
    before = weights_of(model)
    with pytest.raises(CheckpointError, match=reason):
        stage(model, changed)
    assert not differing(before, weights_of(model))


def test_nan_in_fp8_is_refused(tmp_path):
    folder = save(random_model(1, ragged()), tmp_path / "fp8", dtype="fp8")
    model = load(folder)
    edit_tensors(folder, lambda tensors: tensors[EXPERT].view(torch.uint8)[0].fill_(0xFF))
    with pytest.raises(CheckpointError, match="NaN"):
        stage(model, folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_numbers_that_are_not_finite_are_found_wherever_they_are(dtype, seed):
    largest = torch.full((700,), torch.finfo(dtype).max, dtype=dtype)
    gen = torch.Generator().manual_seed(seed)
    assert is_finite(largest[:0])
    assert is_finite(largest)  # its sum is not
    inf = float("inf")
    for value in (float("nan"),) if dtype == torch.float8_e4m3fn else (float("nan"), inf, -inf):
        for tensor in (largest.clone(), torch.ones(700).to(dtype)):
            tensor[int(torch.randint(700, (), generator=gen))] = value
            assert not is_finite(tensor)


def test_truncated_files_absent_files_and_absent_folders(model, changed):
    (file,) = changed.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        stage(model, changed)
    file.unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        stage(model, changed)
    with pytest.raises(CheckpointError, match="no such directory"):
        stage(model, changed / "nowhere")


def test_a_config_of_another_model_is_refused(model, changed):
    edit_json(changed / "config.json", num_experts_per_tok=1)
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok 1 \(in use: 2\)"):
        stage(model, changed)
    edit_json(changed / "config.json", num_experts_per_tok=2, dtype="float16", transformers_version="9")
    stage(model, changed)
    (changed / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        stage(model, changed)


def test_files_written_to_while_they_are_read(model, changed, monkeypatch):
    """By a trainer that saves its next step over the last one: what was read may be half of either."""
    (file,) = changed.glob("*.safetensors")
    read, content = update.read_weights, file.read_bytes()

    def overtaken(*args, **kwargs):
        read(*args, **kwargs)
        file.write_bytes(content)

    monkeypatch.setattr(update, "read_weights", overtaken)
    with pytest.raises(CheckpointError, match="was written to while it was read; nothing was replaced"):
        stage(model, changed)


def test_identity_tells_folders_apart(folder, changed):
    first = identity_of(changed)
    assert first == identity_of(changed) != identity_of(folder)
    (file,) = changed.glob("*.safetensors")
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    assert identity_of(changed) != first
    assert len(first) == 16
    assert json.loads((changed / "config.json").read_text())
