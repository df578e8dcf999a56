"""Checkpoint directory -> model in memory, shard by shard.

    config.json -> tensors expected | shard headers -> tensors found | they fit? -> allocate -> read each into its place

A weight that is kept as stored is read from the file into the parameter itself. One that is cast or dequantized goes
through a buffer of a few megabytes. So host memory stays at the model plus buffers, however large the shards are.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.dtypes import cast, dtype_name, parse_dtype
from glm5.checkpoint.fit import Fit, fit
from glm5.checkpoint.index import ShardIndex, counted, scan
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.resolve import resolve
from glm5.checkpoint.shard import DTYPES, TensorEntry, read_into, read_tensor
from glm5.common.errors import ConfigError
from glm5.common.progress import Progress
from glm5.config.model import ModelConfig
from glm5.kernels.block_scaled import BLOCK, BlockScaled
from glm5.model.glm5 import Glm5
from glm5.model.lowering import use_block_scaled

logger = logging.getLogger(__name__)

CHUNK = 1 << 18  # elements that a reader casts or dequantizes at a time, which takes some 20 bytes of each
NUM_READERS = 4  # one alone waits for page faults half of the time


def load(
    path_or_id: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    lora_norm_eps: float | None = None,
) -> Glm5:
    """The model of a checkpoint directory or hub id, in eval mode; `model.cfg` says what it became.

    `dtype` "auto" keeps what the checkpoint holds, FP8 weights included; a name or a torch.dtype dequantizes and casts
    (float64 product of weight and scale, rounded once). The router's selection bias is float32 always.
    `lora_norm_eps` overrides the config's. Raises `CheckpointError` for files that are damaged or do not fit the
    config, `ConfigError` for a bad config.json, dtype or device.
    """
    wanted = None if dtype == "auto" else parse_dtype(dtype, special=("auto",))
    target = parse_device(device)
    directory = resolve(path_or_id)
    cfg = ModelConfig.from_file(directory)
    index = scan(directory)
    found = fit(index, cfg)
    found.check()
    _log(found, cfg)

    kept = found.kept if wanted is None else frozenset()
    compute = wanted or _common_dtype(found, index)
    changes: dict[str, Any] = {"dtype": dtype_name(compute)}
    if lora_norm_eps is not None:
        changes["lora_norm_eps"] = lora_norm_eps
    if not kept:
        changes["quantization_config"] = None
    model = _empty_model(found.cfg.replace(**changes), kept, compute, target)
    parameters = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    read_weights(parameters, directory, index, found.specs, scaled=found.scaled, kept=kept)
    return model.eval()


def parse_device(device: str | torch.device) -> torch.device:
    """The device, if this machine has it."""
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device: got {device}; allowed: cpu, or a device that torch finds here ({reason})") from None
    return target


def _common_dtype(found: Fit, index: ShardIndex) -> torch.dtype:
    """The dtype of most bytes that are not FP8: the model's activations have one dtype, so its weights do too."""
    num_bytes: Counter[str] = Counter()
    for name, spec in found.specs.items():
        if name not in found.scaled and spec.dtype == "bf16":
            num_bytes[index.entries[name].dtype] += index.entries[name].num_bytes
    return DTYPES[num_bytes.most_common(1)[0][0]]


def _log(found: Fit, cfg: ModelConfig) -> None:
    if found.ignored:
        logger.info("%s: ignored %s", found.source, counted(found.ignored, "tensor"))
    if found.cfg.num_nextn_predict_layers != cfg.num_nextn_predict_layers:
        logger.warning("%s has no MTP tensors: loaded without the MTP layer, so it cannot draft", found.source)


def _empty_model(cfg: ModelConfig, kept: frozenset[str], compute: torch.dtype, device: torch.device) -> Glm5:
    """A model with uninitialised parameters on `device`, FP8 modules for the weights `kept`."""
    with torch.device("meta"):
        model = Glm5(cfg)
        use_block_scaled(model, sorted({slot_of(name).module for name in kept}))
    # Only float8 weights, their scales and the selection bias have a dtype of their own.
    fixed = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float8_e4m3fn}
    fixed |= {name + SCALE_SUFFIX for name in fixed}
    parameters = {
        name: torch.empty(
            tensor.shape,
            dtype=tensor.dtype if name in fixed or name.endswith("e_score_correction_bias") else compute,
            device=device,
        )
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(parameters, assign=True)
    return model


def read_weights(
    parameters: Mapping[str, Tensor],
    directory: Path,
    index: ShardIndex,
    names: Iterable[str],
    *,
    scaled: frozenset[str],
    kept: frozenset[str],
) -> None:
    """Read the weights called `names` on disk into their places in `parameters`, in the order of the files.

    `scaled`: those stored as FP8 with block scales; of them `kept` stay FP8, the others are dequantized.
    """
    entries = [index.entries[name] for name in names]
    entries += [index.entries[entry.name + SCALE_SUFFIX] for entry in entries if entry.name in kept]
    entries.sort(key=lambda entry: (entry.file, entry.start))
    dequantized = scaled - kept
    total = sum(entry.num_bytes for entry in entries)

    def place(entry: TensorEntry) -> None:
        slot = slot_of(entry.name)
        target = slot.view(parameters[slot.parameter])
        if entry.name in dequantized:
            _dequantize_into(directory, entry, index.entries, target)
        else:
            _read_or_cast_into(directory, entry, target)

    title = f"loading {directory.name}"
    with ThreadPoolExecutor(NUM_READERS) as readers, Progress(total=total, unit="B", desc=title) as progress:
        for entry, _ in zip(entries, readers.map(place, entries), strict=True):  # an error cancels what has not begun
            progress.update(entry.num_bytes, shard=entry.file)


def _read_or_cast_into(directory: Path, entry: TensorEntry, target: Tensor) -> None:
    stored = DTYPES[entry.dtype]
    if target.dtype == stored and target.device.type == "cpu":
        read_into(directory, entry, target)
        return
    for start, stop in _row_ranges(entry.shape, multiple_of=1):
        rows = torch.empty((stop - start, *entry.shape[1:]), dtype=stored)
        read_into(directory, entry, rows, first_byte=start * (entry.num_bytes // entry.shape[0]))
        target[start:stop].copy_(cast(rows.to(target.device), target.dtype))


def _dequantize_into(directory: Path, entry: TensorEntry, entries: Mapping[str, TensorEntry], target: Tensor) -> None:
    """Weight times scale, which may be in another shard. Ragged edges: the last scale is cut, not stretched."""
    scale = read_tensor(directory, entries[entry.name + SCALE_SUFFIX]).to(target.device)
    for start, stop in _row_ranges(entry.shape, multiple_of=BLOCK):
        rows = torch.empty((stop - start, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
        read_into(directory, entry, rows, first_byte=start * entry.shape[1])
        part = BlockScaled(rows.to(target.device), scale[start // BLOCK : -(-stop // BLOCK)])
        target[start:stop].copy_(part.dequantize(target.dtype))


def _row_ranges(shape: tuple[int, ...], multiple_of: int) -> list[tuple[int, int]]:
    """[start, stop) row ranges of about CHUNK elements that cover the first dimension."""
    row_elements = torch.Size(shape[1:]).numel()
    step = max(1, CHUNK // max(1, row_elements * multiple_of)) * multiple_of
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
