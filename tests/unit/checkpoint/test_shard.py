"""One safetensors file: ours and the library's read each other, and every kind of damage is named."""

import json
import os
import struct
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.checkpoint import shard
from glm5.checkpoint.shard import DTYPES, read_header, read_into, read_tensor
from glm5.checkpoint.writer import TensorLayout, split_shards, write_shards
from glm5.common.errors import CheckpointError

SHAPES = {"F32": (3, 5), "BF16": (7, 1), "F8_E4M3": (3, 3), "F64": (1,), "I64": (0, 4), "BOOL": (2, 2, 2)}


@pytest.fixture
def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{i}.{code}": torch.randn(shape, generator=generator).to(DTYPES[code])
        for i, (code, shape) in enumerate(SHAPES.items())
    }


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_we_read_what_the_library_writes(tmp_path, tensors):
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = {entry.name: entry for entry in read_header(tmp_path / "x.safetensors")}
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(read_tensor(tmp_path, entries[name]), tensor)


def test_the_library_reads_what_we_write(tmp_path, tensors):
    layout = [TensorLayout(name, name[2:], tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_shards(tmp_path, layout, tensors.values(), max_shard_bytes=10**9, desc="test")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    for entry in read_header(tmp_path / "model.safetensors"):
        assert entry.num_bytes == 0 or entry.start % DTYPES[entry.dtype].itemsize == 0, "readers map tensors in place"


def test_long_reads_go_in_pieces(tmp_path, monkeypatch):
    tensor = torch.arange(1000, dtype=torch.int32)
    save_file({"a": tensor}, tmp_path / "x.safetensors")
    monkeypatch.setattr(shard, "MAX_READ_BYTES", 17)
    (entry,) = read_header(tmp_path / "x.safetensors")
    assert torch.equal(read_tensor(tmp_path, entry), tensor)


def test_shards_are_full_but_not_over(seed):
    sizes = torch.randint(1, 40, (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    layout = [TensorLayout(str(i), "U8", (size,)) for i, size in enumerate([*sizes, 500, 3])]
    shards = split_shards(layout, 100)
    assert [tensor for part in shards for tensor in part] == layout
    assert all(sum(t.num_bytes for t in part) <= 100 or len(part) == 1 for part in shards)
    for part, following in pairwise(shards):
        assert sum(t.num_bytes for t in part) + following[0].num_bytes > 100


def write_raw(path, header, num_bytes, header_length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", header_length or len(raw)) + raw + bytes(num_bytes))


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


DAMAGE = {
    "data cut off": (({"a": entry([4], 0, 16)}, 12), "truncated: its header promises"),
    "bytes too many": (({"a": entry([4], 0, 16)}, 20), "4 bytes follow the last tensor"),
    "header cut off": ((b'{"a"', 0, 1000), "truncated: its header alone needs 1008 bytes, the file has 12"),
    "header not JSON": ((b"\xff\xfe not json", 0), "the header cannot be understood"),
    "header not an object": ((b"[1, 2]", 0), "it is not a JSON object"),
    "entry without shape": (({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4), "'shape'"),
    "size against shape": (({"a": entry([5], 0, 16)}, 16), "16 bytes for F32 of shape [5]"),
    "negative offset": (({"a": entry([1], -4, 0)}, 0), "must be whole numbers"),
    "overlap": (({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12), "leaves a hole or overlaps"),
    "hole": (({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12), "tensor b leaves a hole"),
    "header too deep": ((b'{"a": ' + b"[" * 100_000, 0), "maximum recursion depth exceeded"),
    "dtype of no kind": (({"a": entry([1], 0, 4, dtype=None)}, 4), "a: the dtype must be a name, got None"),
    "a name twice": ((b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 3}', 1), "'a' appears twice"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_names_the_file(tmp_path, kind):
    args, message = DAMAGE[kind]
    path = tmp_path / "model-00002-of-00003.safetensors"
    write_raw(path, *args)
    with pytest.raises(CheckpointError) as raised:
        read_header(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: its header alone needs 8 bytes, the file has 0"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_files_that_are_something_else(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: No such file"):
        read_header(tmp_path / "model.safetensors")


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    save_file({"a": torch.ones(100)}, tmp_path / "x.safetensors")
    (found,) = read_header(tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", found.stop - 8)
    with pytest.raises(CheckpointError, match="ended inside tensor a"):
        read_into(tmp_path, found, torch.empty(100))
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(CheckpointError, match="reading a failed: No such file"):
        read_into(tmp_path, found, torch.empty(100))
