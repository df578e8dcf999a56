"""Loading onto a GPU gives the CPU's bits (dequantized there, too), and saving from it the same files."""

import pytest
import torch

from glm5.checkpoint import staging
from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.config.presets import preset
from glm5.parallel.table import UNSHARDED, Shard
from tests.support.checkpoints import ragged, read_tensors
from tests.support.models import random_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    return save(random_model(1, ragged()), tmp_path_factory.mktemp("gpu") / "fp8", dtype="fp8", max_shard_bytes=100_000)


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32", "float16", "float64"])
def test_the_same_bits_as_on_the_cpu(fp8, dtype):
    there = load(fp8, dtype=dtype, device="cuda").state_dict()
    here = load(fp8, dtype=dtype).state_dict()
    assert all(tensor.is_cuda for tensor in there.values())
    assert all(there[name].dtype == here[name].dtype for name in here)
    assert all(torch.equal(bits(there[name]), bits(here[name])) for name in here)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("shard", [UNSHARDED, Shard(0, 2), Shard(1, 2)], ids=str)
def test_rooms_are_taken_in_turns(shard, dtype, tmp_path, monkeypatch):
    """Tensors that take many rooms, of which one is filled while the other is copied; a rank's rows and columns."""
    source = save(random_model(3, preset("tiny")), tmp_path / "fp8", dtype="fp8")
    here = load(source, dtype=dtype, shard=shard).state_dict()
    monkeypatch.setattr(staging, "_BUFFER_BYTES", 16 << 10)
    for _ in range(3):
        there = load(source, dtype=dtype, device="cuda", shard=shard).state_dict()
        assert all(torch.equal(bits(there[name]), bits(here[name])) for name in here)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_saved_from_the_gpu(fp8, tmp_path, dtype):
    save(load(fp8, device="cuda"), tmp_path / "there", dtype=dtype)
    save(load(fp8), tmp_path / "here", dtype=dtype)
    there, here = read_tensors(tmp_path / "there"), read_tensors(tmp_path / "here")
    assert there.keys() == here.keys()
    assert all(torch.equal(bits(there[name]), bits(here[name])) for name in here)


def test_quantized_on_the_gpu(tmp_path):
    model = random_model(2, ragged())
    save(model, tmp_path / "here", dtype="fp8")
    save(model.to("cuda"), tmp_path / "there", dtype="fp8")
    there, here = read_tensors(tmp_path / "there"), read_tensors(tmp_path / "here")
    assert all(torch.equal(bits(there[name]), bits(here[name])) for name in here)
