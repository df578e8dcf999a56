"""Checkpoint directory -> model in memory, shard by shard.

    config.json -> expected tensors | shard headers -> tensors found | compare -> allocate -> read each into its place

On a CPU a weight that keeps its dtype is read from the file directly into the parameter. A weight that is cast,
dequantized or copied to a GPU goes through a buffer of a few megabytes (staging.py). So host memory is the model, if it
is on the CPU, plus buffers, whatever the size of the shards.

Each tensor-parallel rank reads its own part of each tensor (`glm5.parallel.table`), all ranks at the same time.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from glm5.checkpoint.dtypes import cast, dtype_name, parse_dtype
from glm5.checkpoint.fit import ROTATIONS, Fit, fit
from glm5.checkpoint.formats.base import Stored
from glm5.checkpoint.index import ShardIndex, counted, scan
from glm5.checkpoint.masters import Master
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.resolve import resolve
from glm5.checkpoint.shard import DTYPES, TensorEntry, mapped, read_into, read_tensor
from glm5.checkpoint.staging import Staging, StagingPool
from glm5.checkpoint.stored import BLOCKS, check_groups, read_quantized, weight_formats
from glm5.common import host_memory
from glm5.common.errors import ConfigError
from glm5.common.progress import Progress
from glm5.config.model import ModelConfig
from glm5.kernels.block_scaled import BLOCK, BlockScaled
from glm5.kernels.quantized_weight import WeightFormat
from glm5.model.experts import QuantizedExperts
from glm5.model.glm5 import Glm5
from glm5.model.linear import QuantizedLinear
from glm5.model.lowering import use_block_scaled, use_quantized
from glm5.parallel.table import UNSHARDED, Shard, Span, check_blocks, local_config, scale_span, span_of

logger = logging.getLogger(__name__)

HIDDEN, CHAINED = ROTATIONS
NUM_READERS = {"cpu": 4, "cuda": 8}  # one waits for page faults half of the time; four do not saturate the bus
PIECE_BYTES = 64 << 20  # read at a time by a thread: else all would wait for the one with the 1.9 GB embedding


def load(
    path_or_id: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    lora_norm_eps: float | None = None,
    shard: Shard = UNSHARDED,
    on_read: Callable[[int, float], None] = lambda _num_bytes, _seconds: None,
    on_share: Callable[[float], None] = lambda _share: None,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Glm5:
    """The model of a checkpoint directory or hub id, in eval mode; `model.cfg` is its config as loaded.

    `dtype` "auto" keeps the dtypes of the checkpoint, FP8 included; a name or a torch.dtype dequantizes and casts
    (float64 product of weight and scale, rounded once). The router's selection bias is always float32.
    `lora_norm_eps` overrides the config's. With a `shard` the modules hold that rank's part of their weights, without
    the reductions between ranks (`glm5.parallel.apply` adds them); `model.cfg` is the unsharded model's. On device meta
    nothing is read. `on_read` is called with the bytes read and the seconds it took, `on_share` during loading with the
    share that is done, 0 to 1. `changes`: keys of config.json to override that no weight depends on, such as
    index_topk. Raises `CheckpointError` for files that are damaged or do not fit the config, `ConfigError` for a bad
    config.json, dtype or device, and for a model that cannot be sharded over so many ranks.
    """
    wanted = None if dtype == "auto" else parse_dtype(dtype, special=("auto",))
    target = parse_device(device)
    directory = resolve(path_or_id)
    cfg = ModelConfig.from_file(directory)
    index = scan(directory)
    found = fit(index, cfg)
    found.check()
    _log_differences(found, cfg)
    changed = dict(changes) if lora_norm_eps is None else {**changes, "lora_norm_eps": lora_norm_eps}
    found = replace(found, cfg=found.cfg.replace(**changed))
    return read_model(directory, index, found, wanted, target, shard, on_read, on_share)


def read_model(
    directory: Path,
    index: ShardIndex,
    found: Fit,
    wanted: torch.dtype | None,
    target: torch.device,
    shard: Shard = UNSHARDED,
    on_read: Callable[[int, float], None] = lambda _num_bytes, _seconds: None,
    on_share: Callable[[float], None] = lambda _share: None,
) -> Glm5:
    """The model of `found.cfg` with the tensors of `found.specs` read into it, as `load` does; other parameters are
    left uninitialised. `wanted`: the dtype to cast to, None to keep the stored ones."""
    kept = found.kept if wanted is None else frozenset()
    compute = wanted or _common_dtype(found, index)
    changes: dict[str, Any] = {"dtype": dtype_name(compute)}
    formats = weight_formats(found.stored, found.cfg, target) if wanted is None else {}
    if not kept and not formats:
        changes["quantization_config"] = None
    unsharded = found.cfg.replace(**changes)
    local = local_config(unsharded, shard.size)
    check_blocks(unsharded, [(name, found.specs[name].shape) for name in sorted(kept)], shard.size)
    check_groups(found.stored.values(), shard.size)
    model = empty_model(local, kept, compute, target, formats, is_rotated=found.is_rotated, num_ranks=shard.size)
    model.cfg = unsharded
    if target.type == "meta":
        return model.eval()
    parameters = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    began = time.monotonic()
    num_bytes = read_weights(
        parameters,
        directory,
        index,
        found.specs,
        scaled=found.scaled,
        kept=kept,
        stored=found.stored,
        shard=shard,
        may_map=True,
        on_share=on_share,
    )
    seconds = time.monotonic() - began
    of = f", rank {shard.rank} of {shard.size}" if shard.size > 1 else ""
    gigabytes = num_bytes / 1e9
    on_read(num_bytes, seconds)
    logger.info("%s: read %.2f GB in %.1f s, %.2f GB/s%s", directory, gigabytes, seconds, gigabytes / seconds, of)
    return model.eval()


def parse_device(device: str | torch.device) -> torch.device:
    """The device. Raises ConfigError where this machine does not have it."""
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device: got {device}; allowed: cpu, or a device that torch finds here ({reason})") from None
    return target


def _common_dtype(found: Fit, index: ShardIndex) -> torch.dtype:
    """The dtype of most bytes that are not quantized. Activations have one dtype, so weights are all cast to it."""
    num_bytes: Counter[str] = Counter()
    for name, spec in found.specs.items():
        if name not in found.scaled and name not in found.stored and spec.dtype == "bf16":
            num_bytes[index.entries[name].dtype] += index.entries[name].num_bytes
    return DTYPES[num_bytes.most_common(1)[0][0]]


def _log_differences(found: Fit, cfg: ModelConfig) -> None:
    if found.ignored:
        logger.info("%s: ignored %s", found.source, counted(found.ignored, "tensor"))
    if found.cfg.num_nextn_predict_layers != cfg.num_nextn_predict_layers:
        logger.warning("%s has no MTP tensors: loaded without the MTP layer, so it cannot draft", found.source)


def empty_model(
    cfg: ModelConfig,
    kept: frozenset[str],
    compute: torch.dtype,
    device: torch.device,
    formats: Mapping[str, WeightFormat | Literal["blocks"]] | None = None,
    *,
    is_rotated: bool = False,
    num_ranks: int = 1,
) -> Glm5:
    """A model with uninitialised parameters on `device`.

    `kept`: names on disk of the weights that stay FP8. `formats`: of quantized modules. `is_rotated`: the MTP layer has
    rotations. `num_ranks`: ranks of this machine that allocate the same amount. Raises ConfigError when there is not
    enough memory.
    """
    formats = formats or {}
    blocks = {slot_of(name).module for name in kept} | {name for name, each in formats.items() if each == BLOCKS}
    with torch.device("meta"):
        model = Glm5(cfg)
        use_block_scaled(model, sorted(blocks))
        if is_rotated:
            model.mtp.add_rotations()
        use_quantized(model, {name: each for name, each in formats.items() if isinstance(each, WeightFormat)})
    # Only quantized weights, their scales and the selection bias have a dtype of their own.
    fixed = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float8_e4m3fn}
    fixed |= {name + SCALE_SUFFIX for name in fixed}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            fixed |= {f"{path}.{name}" for name in module.state_dict()}
    like = {
        name: tensor if name in fixed or name.endswith("e_score_correction_bias") else tensor.to(compute)
        for name, tensor in model.state_dict().items()
    }
    _check_memory(sum(tensor.nbytes for tensor in like.values()), device, num_ranks)
    parameters = {name: torch.empty_like(tensor, device=device) for name, tensor in like.items()}
    model.load_state_dict(parameters, assign=True)
    return model


def _check_memory(num_bytes: int, device: torch.device, num_ranks: int) -> None:
    """ConfigError when there is not enough memory: else the kernel might kill other processes."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        needed, free = num_bytes, torch.cuda.mem_get_info(device)[0] + kept
    elif device.type == "cpu" and num_bytes * num_ranks > host_memory.total():
        needed, free = num_bytes * num_ranks, host_memory.total()  # other ranks may have allocated already
    elif device.type == "cpu":
        needed, free = num_bytes, host_memory.available()
    else:
        return
    if needed > free:
        raise ConfigError(
            f"the weights take {needed / 1e9:.1f} GB, and {device} has {free / 1e9:.1f} GB for them; take a smaller or "
            "quantized model, fewer layers, or more GPUs that share it (--tensor-parallel-size)"
        )


class _Piece(NamedTuple):
    """A reader's unit of work: rows of this rank's part of a tensor, or all of them where it cannot be split."""

    entry: TensorEntry
    rows: slice
    num_bytes: int


def read_weights(
    parameters: Mapping[str, Tensor],
    source: Path | Tensor,
    index: ShardIndex,
    names: Iterable[str],
    *,
    scaled: frozenset[str],
    kept: frozenset[str],
    stored: Mapping[str, Stored],
    masters: Mapping[str, Master] = MappingProxyType({}),
    shard: Shard = UNSHARDED,
    may_map: bool = False,
    quiet: bool = False,
    on_share: Callable[[float], None] = lambda _share: None,
) -> int:
    """Read the weights called `names` on disk into `parameters`, in the order of the files. `source`: their directory,
    or the bytes of one file in memory, on any device.

    `scaled`: weights stored as FP8 with block scales; `kept`: those of them that stay FP8, the others are dequantized.
    `stored`: weights in other quantized formats. `masters`: floats of weights that `parameters` hold quantized. With a
    `shard`, `parameters` are that rank's. `may_map`: whether files may be memory-mapped (see `mapped`). `quiet`:
    progress is not shown. Returns the number of bytes read.
    """
    names = list(names)
    weights = [index.entries[name] for name in names if name not in stored]
    scales = [index.entries[entry.name + SCALE_SUFFIX] for entry in weights if entry.name in kept]
    # A quantized matrix is read together with its scales, at the position of its codes.
    quantized = {stored[name].parts["codes"].name: stored[name] for name in names if name in stored}
    spans = _spans(weights, scales, quantized, shard)
    entries = [*weights, *scales, *(index.entries[name] for name in quantized)]
    entries.sort(key=lambda entry: (entry.file, entry.start))
    dequantized = scaled - kept
    num_bytes = {
        entry.name: _num_bytes(entry, spans[entry.name], shard.size if entry.name in quantized else None)
        for entry in entries
    }
    chained = {entry.name for entry in entries if entry.name.endswith(CHAINED)}
    unsplit = quantized.keys() | dequantized | masters.keys() | chained
    device = next(iter(parameters.values())).device
    staging_pool = StagingPool(device)

    def read(piece: _Piece) -> None:
        staging = staging_pool.of_this_thread()
        with staging.on_stream():
            read_rows(staging, piece.entry, piece.rows)

    def read_rows(staging: Staging, entry: TensorEntry, rows: slice) -> None:
        if entry.name in quantized:
            read_quantized(source, index.entries, quantized[entry.name], parameters, spans[entry.name], staging)
            return
        slot = slot_of(entry.name)
        target, span = slot.view(parameters[slot.parameter]), spans[entry.name]
        if entry.name.endswith(CHAINED):
            target.copy_(_chained_rotation(source, entry, index.entries))
        elif entry.name in masters:
            masters[entry.name].quantize_into(entry.name, read_tensor(source, entry).to(device), parameters, span)
        elif entry.name in dequantized:
            _dequantize_into(source, entry, index.entries, target, span, staging)
        elif span is not None and span.dim == 1:
            _read_columns_into(source, entry, target, span, staging, may_map=may_map)
        else:
            first_row = rows.start + (0 if span is None else span.start)
            _read_or_cast_into(source, entry, target[rows], first_row, staging)

    work = [piece for entry in entries for piece in _pieces(entry, spans[entry.name], num_bytes[entry.name], unsplit)]
    title, total, num_read = f"loading {Path(index.source).name}", sum(num_bytes.values()), 0
    shown = Progress(total=total, unit="B", desc=title) if shard.rank == 0 and not quiet else nullcontext()
    try:
        is_there = isinstance(source, Tensor) and source.is_cuda  # nothing to wait for
        with ThreadPoolExecutor(num_readers(device)) as readers, shown as progress:
            done = map(read, work) if is_there else readers.map(read, work)  # an error cancels the rest
            for piece, _ in zip(work, done, strict=True):
                num_read += piece.num_bytes
                on_share(num_read / total)
                if progress is not None:
                    progress.update(piece.num_bytes, shard=piece.entry.file)
    finally:  # also after an error: pending copies would write into memory that may have been reused
        staging_pool.finish()
    return total


def _spans(
    weights: Iterable[TensorEntry], scales: Iterable[TensorEntry], quantized: Mapping[str, Stored], shard: Shard
) -> dict[str, Span | None]:
    """This rank's part of each tensor, by its name; of quantized matrices by that of their codes."""
    spans = {entry.name: span_of(entry.name, entry.shape, shard) for entry in weights}
    for scale in scales:
        span = spans[scale.name.removesuffix(SCALE_SUFFIX)]
        spans[scale.name] = None if span is None else scale_span(span)
    return spans | {name: span_of(matrix.name, matrix.shape, shard) for name, matrix in quantized.items()}


def _pieces(entry: TensorEntry, span: Span | None, num_bytes: int, unsplit: Set[str]) -> list[_Piece]:
    """Units of work for this rank's part of a tensor, of `num_bytes` bytes."""
    if entry.name in unsplit or (span is not None and span.dim == 1):
        return [_Piece(entry, slice(None), num_bytes)]
    num_rows = entry.shape[0] if span is None else span.stop - span.start
    row_bytes = num_bytes // max(1, num_rows)
    ranges = _row_ranges(num_rows, max(1, PIECE_BYTES // max(1, row_bytes)))
    return [_Piece(entry, slice(start, stop), (stop - start) * row_bytes) for start, stop in ranges]


def num_readers(device: torch.device) -> int:
    """Number of threads that read tensors for a device."""
    return NUM_READERS.get(device.type, NUM_READERS["cpu"])


def _chained_rotation(source: Path | Tensor, entry: TensorEntry, entries: Mapping[str, TensorEntry]) -> Tensor:
    """MTPLayer's chained_rotation: on disk it already contains hidden_rotation, which is divided out here."""
    hidden = read_tensor(source, entries[entry.name.replace(CHAINED, HIDDEN)]).double()
    return torch.linalg.solve(hidden, read_tensor(source, entry).double(), left=False)


def _num_bytes(entry: TensorEntry, span: Span | None, num_parts: int | None) -> int:
    """Bytes of a part of a tensor. `num_parts`: of codes, whose span counts the elements that they stand for."""
    if span is not None and num_parts is not None:
        return entry.num_bytes // num_parts
    return entry.num_bytes if span is None else entry.num_bytes // entry.shape[span.dim] * (span.stop - span.start)


def _cast_into(target: Tensor, rows: Tensor) -> None:
    target.copy_(cast(rows, target.dtype))


def _pass_rows(
    source: Path | Tensor, entry: TensorEntry, rows: range, staging: Staging, consume: Callable[[Tensor], object]
) -> None:
    """Call `consume` with those rows on the staging's device, in their stored dtype."""
    if isinstance(source, Tensor):
        consume(read_tensor(source, entry)[rows.start : rows.stop].to(staging.device))
        return
    held = staging.buffer((len(rows), *entry.shape[1:]), DTYPES[entry.dtype])
    read_into(source, entry, held, first_byte=rows.start * (entry.num_bytes // max(1, entry.shape[0])))
    staging.submit(held, consume)


def _read_or_cast_into(
    source: Path | Tensor, entry: TensorEntry, target: Tensor, first_row: int, staging: Staging
) -> None:
    """Fill `target` with as many rows from `first_row` on, cast to its dtype."""
    stored, row_bytes = DTYPES[entry.dtype], entry.num_bytes // max(1, entry.shape[0])
    if target.dtype == stored and target.device.type == "cpu":
        read_into(source, entry, target, first_byte=first_row * row_bytes)
        return
    if isinstance(source, Tensor) and source.is_cuda:
        _cast_into(target, read_tensor(source, entry)[first_row : first_row + len(target)])
        return
    for start, stop in _row_ranges(len(target), staging.rows(row_bytes, stored.itemsize)):
        rows = range(first_row + start, first_row + stop)
        _pass_rows(source, entry, rows, staging, partial(_cast_into, target[start:stop]))


def _read_columns_into(
    source: Path | Tensor, entry: TensorEntry, target: Tensor, span: Span, staging: Staging, *, may_map: bool
) -> None:
    stored = DTYPES[entry.dtype]
    columns, width = slice(span.start, span.stop), stored.itemsize
    if may_map and isinstance(source, Path) and (matrix := mapped(source, entry)) is not None:
        part = matrix[:, columns]
        if target.dtype == stored and target.device.type == "cpu":
            target.copy_(part)
            return
        for start, stop in _row_ranges(len(target), staging.rows(part.shape[1] * width, width)):
            rows = staging.buffer((stop - start, part.shape[1]), stored)
            staging.submit(rows.copy_(part[start:stop]), partial(_cast_into, target[start:stop]))
        return
    for start, stop in _row_ranges(len(target), staging.rows(entry.shape[1] * width, width)):
        into = target[start:stop]
        _pass_rows(
            source, entry, range(start, stop), staging, lambda rows, into=into: _cast_into(into, rows[:, columns])
        )


def _dequantize_into(
    source: Path | Tensor,
    entry: TensorEntry,
    entries: Mapping[str, TensorEntry],
    target: Tensor,
    span: Span | None,
    staging: Staging,
) -> None:
    """Weight times scale, which may be in another shard file. At ragged edges the last block is cut off. Blocks that
    only partly belong to a rank are read completely."""
    scale = read_tensor(source, entries[entry.name + SCALE_SUFFIX]).to(target.device)
    stored, num_rows, width = DTYPES[entry.dtype], *entry.shape
    (first_row, last_row), columns = (0, num_rows), slice(0, width)
    if span is not None:
        first_row, last_row = (span.start, span.stop) if span.dim == 0 else (first_row, last_row)
        columns = slice(span.start, span.stop) if span.dim == 1 else columns
    for start, stop in _row_ranges(num_rows, max(1, staging.rows(width, stored.itemsize) // BLOCK) * BLOCK):
        begin, end = max(start, first_row), min(stop, last_row)
        if begin >= end:
            continue
        of_rows = scale[start // BLOCK : -(-stop // BLOCK)]
        into, some = target[begin - first_row : end - first_row], slice(begin - start, end - start)

        def dequantize(rows: Tensor, of_rows: Tensor = of_rows, into: Tensor = into, some: slice = some) -> None:
            into.copy_(BlockScaled(rows, of_rows).dequantize(into.dtype)[some, columns])

        _pass_rows(source, entry, range(start, stop), staging, dequantize)


def _row_ranges(num_rows: int, step: int) -> list[tuple[int, int]]:
    """[start, stop) row ranges that cover the first dimension."""
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
