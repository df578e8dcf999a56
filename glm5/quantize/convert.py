"""A checkpoint in another type: FP8 in blocks of 128 to plain floats and back, a tensor in memory at a time."""

import shlex
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.dtypes import cast, parse_dtype
from glm5.checkpoint.names import SCALE_SUFFIX, place_of
from glm5.checkpoint.save import check_unwritten, config_dict, copy_assets, write_checkpoint
from glm5.checkpoint.shard import CODES, read_tensor
from glm5.checkpoint.writer import TensorLayout
from glm5.common.errors import ConfigError
from glm5.config.tensors import TensorSpec
from glm5.kernels.block_scaled import FP8, BlockScaled, num_blocks, quantize_blocks
from glm5.quant.qat import KEY, is_int4
from glm5.quantize.source import Source, check_finite


def convert(model: str | Path, out: Path, dtype: str, max_shard_bytes: int, *, overwrite: bool = False) -> Path:
    """Write `model` at `out` in `dtype`: "fp8" (the published selection, the rest bfloat16) or a name of plain floats.
    Weights that are at `out` are replaced only with `overwrite`.

    FP8 weights that stay FP8 are copied as they are. All or nothing; raises as `save` does, CheckpointError for a
    number that is infinite or none at all, and ConfigError where `out` is `model` or within it, or FP8 would lose what
    training with int4 in view has made of the weights.
    """
    source = Source(model)
    source.check_output(out)
    if not overwrite:
        check_unwritten(out)
    to_fp8 = dtype == "fp8"
    if to_fp8 and (why := _why_int4(source)) is not None:
        raise ConfigError(
            f"{model}: {why}, and FP8 in blocks would round its weights otherwise than training did; allowed: "
            f"glm5 quantize {shlex.quote(str(model))} {shlex.quote(str(out))} --scheme w4a16 --method minmax, which "
            "keeps every bit, or --dtype bfloat16"
        )
    target = torch.bfloat16 if to_fp8 else parse_dtype(dtype, special=("fp8",))
    specs = list(source.fit.specs.values())
    layout = [planned for spec in specs for planned in _layout(spec, target, to_fp8)]
    config = config_dict(source.cfg.replace(quantization_config=None), target, fp8=to_fp8)
    tensors = (tensor for spec in specs for tensor in _tensors(source, spec, target, to_fp8))
    return write_checkpoint(out, config, layout, tensors, partial(copy_assets, source.directory), max_shard_bytes)


def _why_int4(source: Source) -> str | None:
    """By what a checkpoint is known to be trained with int4 in view: its mark, or weights of its first expert."""
    if KEY in source.cfg.extra:
        return f"trained with quantization in view ({KEY} in config.json)"
    trunk = (spec.name for i in range(source.cfg.num_hidden_layers) for spec in source.specs(i))
    for name in islice((name for name in trunk if place_of(name).expert == 0), 3):
        if is_int4(source.tensor(name)):
            return f"{name} lies on an int4 grid, as after training with quantization in view"
    return None


def _layout(spec: TensorSpec, target: torch.dtype, to_fp8: bool) -> list[TensorLayout]:
    if to_fp8 and spec.fp8:
        grid = tuple(num_blocks(size) for size in spec.shape)
        return [TensorLayout(spec.name, CODES[FP8], spec.shape), TensorLayout(spec.name + SCALE_SUFFIX, "F32", grid)]
    return [TensorLayout(spec.name, "F32" if spec.dtype == "f32" else CODES[target], spec.shape)]


def _tensors(source: Source, spec: TensorSpec, target: torch.dtype, to_fp8: bool) -> Iterator[Tensor]:
    entry = source.index.entries[spec.name]
    tensor = read_tensor(source.directory, entry)
    given = torch.float32 if spec.dtype == "f32" else target
    if spec.name not in source.fit.scaled:
        check_finite(tensor, source.directory, entry)
        yield from quantize_blocks(tensor) if to_fp8 and spec.fp8 else (cast(tensor, given),)
        return
    scale = source.index.entries[spec.name + SCALE_SUFFIX]
    scaled = BlockScaled(tensor, read_tensor(source.directory, scale))
    check_finite(scaled.scale, source.directory, scale)
    if to_fp8 and spec.fp8:
        yield from scaled
    else:
        plain = scaled.dequantize(given)
        check_finite(plain, source.directory, entry)
        yield plain
