"""Model in memory -> checkpoint directory in the published layout, atomically.

Everything is written into a directory beside the target, which is renamed to the target when complete. Tensors are
split, cast or quantized one by one, so memory is the model plus one tensor.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.dtypes import cast, dtype_name, parse_dtype
from glm5.checkpoint.formats.fp8 import fp8_config
from glm5.checkpoint.index import counted
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.shard import CODES
from glm5.checkpoint.writer import INDEX_NAME, TensorLayout, write_shards
from glm5.common.atomic import atomic_dir, clear_leftovers
from glm5.common.errors import CheckpointError
from glm5.config.model import ModelConfig
from glm5.config.tensors import TensorSpec, tensor_specs
from glm5.kernels.block_scaled import FP8, BlockScaled, num_blocks, quantize_blocks
from glm5.model.experts import QuantizedExperts
from glm5.model.glm5 import Glm5
from glm5.model.linear import QuantizedLinear

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5_000_000_000
ASSET_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_SHARD_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def save(
    model: Glm5,
    out_dir: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    assets: str | Path | None = None,
) -> Path:
    """Write `model` as a checkpoint at `out_dir`, replacing one that is there; returns the directory.

    `dtype` "auto" stores what is in memory, FP8 weights as FP8; "fp8" quantizes what published FP8 checkpoints
    quantize (128x128 blocks) and stores the rest as bfloat16; a name or torch.dtype dequantizes and casts. `assets` is
    a directory whose tokenizer files, chat template and generation config are copied; without it, those of a replaced
    checkpoint are kept.

    Raises `CheckpointError` when `out_dir` holds other files than a checkpoint's, or writing fails; the directory is
    then unchanged.
    """
    if quantized := [
        name for name, part in model.named_modules() if isinstance(part, QuantizedLinear | QuantizedExperts)
    ]:
        raise CheckpointError(
            f"{out_dir}: the model holds {counted(quantized, 'module')} as codes, which only glm5 quantize writes; "
            "load it with a dtype, which dequantizes, to save it"
        )
    quantize = dtype == "fp8"
    target = torch.bfloat16 if quantize else None if dtype == "auto" else parse_dtype(dtype, special=("auto", "fp8"))
    parts = [_PlannedTensor(spec, model, target, quantize) for spec in tensor_specs(model.cfg)]
    layout = [planned for part in parts for planned in part.layout()]
    scaled = any(part.scaled for part in parts)
    config = config_dict(model.cfg, target or model.dtype, fp8=scaled)
    tensors = (tensor for part in parts for tensor in part.tensors())
    source = Path(assets if assets is not None else out_dir)
    add_assets = partial(copy_assets, source) if assets is not None or source.is_dir() else None
    return write_checkpoint(Path(out_dir), config, layout, tensors, add_assets, max_shard_bytes)


class _PlannedTensor:
    """One tensor of the published inventory: how it is stored, and its values, computed when they are written."""

    def __init__(self, spec: TensorSpec, model: Glm5, dtype: torch.dtype | None, quantize: bool) -> None:
        slot = slot_of(spec.name)
        module = model.get_submodule(slot.module)
        leaf = slot.parameter.rpartition(".")[2]
        self.spec = spec
        self.weight = slot.view(getattr(module, leaf).detach())
        self.scale: Tensor | None = None
        if self.weight.dtype == FP8:
            self.scale = slot.view(getattr(module, leaf + SCALE_SUFFIX).detach())
        self.scaled = (dtype is None or quantize) if self.weight.dtype == FP8 else quantize and spec.fp8
        self.dtype = torch.float32 if spec.dtype == "f32" else dtype or self.weight.dtype

    def layout(self) -> list[TensorLayout]:
        return tensor_layouts(self.spec, self.dtype, fp8=self.scaled)

    def tensors(self) -> Iterator[Tensor]:
        if self.scaled:
            yield from quantize_blocks(self.weight) if self.scale is None else (self.weight, self.scale)
        elif self.scale is not None:
            yield BlockScaled(self.weight, self.scale).dequantize(self.dtype)
        else:
            yield cast(self.weight, self.dtype)


def tensor_layouts(spec: TensorSpec, dtype: torch.dtype, *, fp8: bool) -> list[TensorLayout]:
    """How a tensor is stored: in `dtype` (float32 where the architecture asks for it), or as FP8 with block scales."""
    if fp8:
        scale = TensorLayout(spec.name + SCALE_SUFFIX, "F32", tuple(map(num_blocks, spec.shape)))
        return [TensorLayout(spec.name, CODES[FP8], spec.shape), scale]
    return [TensorLayout(spec.name, CODES[torch.float32 if spec.dtype == "f32" else dtype], spec.shape)]


def write_checkpoint(
    out_dir: Path,
    config: dict[str, Any],
    layout: Sequence[TensorLayout],
    tensors: Iterable[Tensor],
    add_assets: Callable[[Path], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write weights, config.json and generation_config.json atomically; `tensors` come in the order of `layout`.

    `add_assets` is called with the unfinished directory to add further files.
    """
    out_dir = out_dir.expanduser().resolve()
    check_target(out_dir, sum(tensor.num_bytes for tensor in layout))
    try:
        with atomic_dir(out_dir) as building:
            if add_assets is not None:
                add_assets(building)
            _write_json(building / "config.json", config)
            if not (building / "generation_config.json").exists():
                _write_json(building / "generation_config.json", generation_config(config))
            if layout:
                write_shards(building, layout, tensors, max_shard_bytes, desc=f"saving {out_dir.name}")
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{out_dir}: saving failed: {reason}; what was there before is unchanged") from error
    return out_dir


def check_unwritten(out_dir: Path) -> None:
    """Raise `CheckpointError` where `save` would replace weights: for commands without --overwrite."""
    folder = out_dir.expanduser()
    if weights := sorted(path.name for path in folder.glob("*.safetensors") if _SHARD_FILE.fullmatch(path.name)):
        raise CheckpointError(
            f"{out_dir} holds weights, {counted(weights, 'file')}; use them as they are, give another directory, or "
            "--overwrite to replace them"
        )


def check_target(out_dir: Path, num_bytes: int) -> None:
    """Raise `CheckpointError` unless a checkpoint of `num_bytes` may and can be written at `out_dir`."""
    if out_dir.exists():
        if not out_dir.is_dir():
            raise CheckpointError(f"{out_dir} is a file; give a directory")
        other = sorted(path.name for path in out_dir.iterdir() if not _is_checkpoint_file(path))
        if other:
            raise CheckpointError(
                f"{out_dir} holds {counted(other, 'other file')} that no "
                "checkpoint has and that would be lost; give another directory"
            )
    if running := clear_leftovers(out_dir):
        names = counted([path.name for path in running], "folder")
        logger.warning("%s: another save of it is running, or was killed on another machine: %s", out_dir, names)
    existing = next(path for path in (out_dir, *out_dir.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise CheckpointError(f"{out_dir}: needs {num_bytes:,} bytes, and {free:,} are free there")


def _is_checkpoint_file(path: Path) -> bool:
    names = (*ASSET_FILES, "config.json", INDEX_NAME)
    return path.is_file() and (path.name in names or _SHARD_FILE.fullmatch(path.name) is not None)


def config_dict(cfg: ModelConfig, dtype: torch.dtype, fp8: bool) -> dict[str, Any]:
    """config.json for weights in `dtype`, or for FP8 weights with the rest in `dtype`."""
    config = cfg.to_dict()
    config["dtype"] = dtype_name(dtype)
    config.pop("quantization_config", None)
    if fp8:
        config["quantization_config"] = cfg.quantization_config or fp8_config(
            spec.name for spec in tensor_specs(cfg) if not spec.fp8
        )
    return config


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """The published sampling defaults, with the config's own token ids."""
    ids = {key: config[key] for key in ("eos_token_id", "pad_token_id") if key in config}
    return {**ids, "do_sample": True, "temperature": 1.0, "top_p": 0.95}


def copy_assets(source: Path, target: Path) -> None:
    """Copy the tokenizer files, chat template and generation config that `source` has."""
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such directory to copy tokenizer files from")
    for name in ASSET_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
