"""A GGUF file that is laid out at once and filled in place: a run writes it layer by layer, in any order and again.

magic, version, counts | keys and values | names, shapes, types, offsets of tensors | data, aligned to 32 bytes
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.checkpoint.gguf.blocks import TYPES, row_bytes
from glm5.checkpoint.gguf.tensors import FLOATS, GgufTensor, architecture, gguf_tensors
from glm5.checkpoint.shard import CODES, ITEM_BYTES, TensorEntry
from glm5.common.errors import CheckpointError
from glm5.common.extras import require
from glm5.config.model import ModelConfig

FILE = "model.gguf"
_BITS = {type_: bits for bits, type_ in TYPES.items()}
_CODES = {type_: CODES[dtype] for dtype, type_ in FLOATS.items()} | dict.fromkeys(_BITS, "U8")
"""safetensors' code of what lies in the file, by GGUF's type."""
_PIECE_BYTES = 1 << 30  # Linux writes at most 2**31 - 4096 bytes a call


def create(path: Path, types: Mapping[GgufTensor, str], add_fields: Callable[[Any], None]) -> None:
    """Write header, keys and tensor infos, and size the file; its data are zeros. `add_fields` is given the package's
    GGUFWriter, which knows the tensors already."""
    gguf = require("gguf", "gguf")
    part = path.with_name(f"{path.name}.part")
    writer = gguf.GGUFWriter(part, architecture())
    sizes: list[int] = []
    for tensor, type_ in types.items():
        shape = _held(tensor.shape, type_)
        sizes.append(math.prod(shape) * ITEM_BYTES[_CODES[type_]])
        # Of bytes, the writer finds the shape of the values itself.
        dtype = np.dtype(np.uint8 if type_ in _BITS else np.float32)
        writer.add_tensor_info(tensor.name, shape, dtype, sizes[-1], gguf.GGMLQuantizationType[type_])
    add_fields(writer)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    with part.open("r+b") as file:
        end = writer.ggml_pad(file.seek(0, os.SEEK_END), writer.data_alignment)
        file.truncate(end + sum(writer.ggml_pad(size, writer.data_alignment) for size in sizes))
        os.fsync(file.fileno())
    part.replace(path)


def entries(path: Path, cfg: ModelConfig) -> dict[str, TensorEntry]:
    """Where the tensors of a checkpoint of `cfg` lie in a GGUF; quantized ones as bytes [O, bytes of a row].

    Raises CheckpointError for a file that is damaged or lacks one.
    """
    gguf = require("gguf", "gguf")
    try:
        held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as GGUF: {error}") from None
    found: dict[str, TensorEntry] = {}
    for tensor in gguf_tensors(cfg):
        got = held.get(tensor.name)
        if got is None or tuple(reversed(got.shape.tolist())) != tensor.shape or got.tensor_type.name not in _CODES:
            is_there = "absent" if got is None else f"{got.tensor_type.name} {got.shape.tolist()[::-1]}"
            raise CheckpointError(
                f"{path}: {tensor.name} is {is_there}, not {list(tensor.shape)} in {', '.join(_CODES)}"
            )
        shape = _held(tensor.shape, got.tensor_type.name)
        each = shape if len(tensor.sources) == 1 else shape[1:]
        size = int(got.n_bytes) // len(tensor.sources)
        for i, source in enumerate(tensor.sources):
            start = int(got.data_offset) + i * size
            found[source] = TensorEntry(source, _CODES[got.tensor_type.name], each, path.name, start, start + size)
    return found


def fill(path: Path, where: Mapping[str, TensorEntry], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors at their places, which `entries` found, and flush them to disk."""
    with path.open("r+b", buffering=0) as file:
        for name, tensor in tensors.items():
            entry = where[name]
            assert (CODES[tensor.dtype], tuple(tensor.shape)) == (entry.dtype, entry.shape), f"{entry=} {tensor.shape=}"
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.seek(entry.start)
            while data:
                data = data[file.write(data[:_PIECE_BYTES]) :]
        os.fsync(file.fileno())


def _held(shape: tuple[int, ...], type_: str) -> tuple[int, ...]:
    """The shape of what lies in the file: of quantized rows, bytes."""
    return (*shape[:-1], row_bytes(shape[-1], _BITS[type_])) if type_ in _BITS else shape
