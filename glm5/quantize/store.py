"""What a run has on disk before it is done, so that it can be cut off anywhere and go on.

    .NAME.quantizing/
      run.lock             held while a process works there
      progress.json        the run's fingerprint, and the layers that are done: their files, digests and figures
      activations-N        the samples after layer N, the last that is done
      model/               files of weights, each named after its layer; this folder becomes OUT at the end

A file of weights is complete before progress.json names it. What it does not name is overwritten.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.shard import CODES
from glm5.checkpoint.writer import TensorLayout, split_shards, write_file
from glm5.common.atomic import atomic_write, sweep
from glm5.common.errors import CheckpointError
from glm5.quant.record import Quantized
from glm5.quantize.calibrate import Activations

ALONE = {"rot.weight": "rot.safetensors"}
"""Tensors that have a file of their own, which keeps its name: readers look for it there."""


_LOCK = "run.lock"
FILES = "files of the model"  # in a fingerprint


@contextmanager
def held(root: Path) -> Generator[None, None, None]:
    """Hold the folder of an unfinished run. Raises `CheckpointError` while another process works there."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / _LOCK).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{root}: another process is quantizing there; wait for it, or choose another OUT"
            ) from None
        yield


def root_of(out: Path) -> Path:
    """Where the unfinished run of `out` lies."""
    return out.with_name(f".{out.name}.quantizing")


class Store:
    """The folder of an unfinished run beside `out`. `fingerprint`: what a run must agree in to go on with it."""

    def __init__(self, out: Path, fingerprint: dict[str, Any], *, restart: bool = False) -> None:
        self.out = out
        self.root = root_of(out)
        self.model = self.root / "model"
        if restart and self.root.is_dir():
            for path in self.root.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != _LOCK:
                    path.unlink()
        self.model.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.model):
            sweep(folder)
        self.layers: dict[int, dict[str, Any]] = {}
        plain = json.loads(json.dumps(fingerprint))
        if (found := self._read()) is not None:
            before, self.layers = found
            changed = sorted(key for key in plain.keys() | before.keys() if plain.get(key) != before.get(key))
            if changed == [FILES]:
                raise CheckpointError(
                    f"{self.root}: holds a run over what the model's files were before they were written anew; "
                    "--restart begins anew"
                )
            if changed:
                raise CheckpointError(
                    f"{self.root}: holds a run with other settings ({', '.join(changed)}); give those again to go on "
                    "with it, or --restart to begin anew"
                )
        self.fingerprint = plain

    def _read(self) -> tuple[dict[str, Any], dict[int, dict[str, Any]]] | None:
        """The fingerprint of the run that is there, and its layers."""
        path = self.root / "progress.json"
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return dict(found["fingerprint"]), {int(key): dict(value) for key, value in found["layers"].items()}
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            raise CheckpointError(f"{path}: damaged; --restart begins anew") from None

    def write_layer(self, layer_idx: int, tensors: dict[str, Tensor], max_shard_bytes: int) -> dict[str, Any]:
        """Write a layer's files and return what progress.json is to hold of them: names and digests by tensor."""
        layout = [TensorLayout(name, CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
        files: dict[str, list[str]] = {}
        shards = split_shards([planned for planned in layout if planned.name not in ALONE], max_shard_bytes)
        named = {f"layer-{layer_idx + 1:05d}-{part:03d}.safetensors": shard for part, shard in enumerate(shards)}
        named |= {ALONE[planned.name]: [planned] for planned in layout if planned.name in ALONE}
        for name, shard in named.items():
            for _ in write_file(self.model / name, shard, (tensors[planned.name] for planned in shard)):
                pass
            files[name] = [planned.name for planned in shard]
        return {"files": files}

    def done(self, layer_idx: int, entry: dict[str, Any], samples: Activations | None) -> None:
        """Mark a layer as done; from here on the run goes on behind it."""
        if samples is not None:
            samples.save(self._activations(layer_idx))
        self.layers[layer_idx] = entry
        with atomic_write(self.root / "progress.json") as file:
            json.dump({"fingerprint": self.fingerprint, "layers": self.layers}, file)
        for old in self.root.glob("activations-*"):
            if samples is None or old != self._activations(layer_idx):
                old.unlink()

    def restore(self, layer_idx: int, samples: Activations) -> None:
        """The samples as they were after that layer."""
        samples.restore(self._activations(layer_idx))

    def _activations(self, layer_idx: int) -> Path:
        return self.root / f"activations-{layer_idx + 1:05d}.safetensors"

    def files(self) -> Iterator[tuple[str, list[str]]]:
        """Files of weights in their order, and the tensors in each."""
        for layer_idx in sorted(self.layers):
            yield from self.layers[layer_idx]["files"].items()

    def finish(self, prefix: str) -> None:
        """Give the files their last names, write the index, and let the folder become OUT."""
        names = dict(self.files())
        numbered = [old for old in names if old not in ALONE.values()]
        final = {old: old for old in names} | {
            old: f"{prefix}-{i + 1:05d}-of-{len(numbered):05d}.safetensors" for i, old in enumerate(numbered)
        }
        weight_map = {tensor: final[old] for old, tensors in names.items() for tensor in tensors}
        total = 0
        for old, new in final.items():
            if (self.model / old).exists():
                (self.model / old).replace(self.model / new)
            total += (self.model / new).stat().st_size
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        with atomic_write(self.model / f"{prefix}.safetensors.index.json") as file:
            json.dump(index, file, indent=2)
        self.publish()

    def publish(self) -> None:
        """Let the folder become OUT."""
        if self.out.exists():
            self.out.rmdir()
        self.model.replace(self.out)
        shutil.rmtree(self.root, ignore_errors=True)


def digest(tensors: dict[str, Tensor]) -> str:
    """Of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(_bytes(tensor))
    return found.hexdigest()


def digest_of(quantized: Quantized) -> str:
    """Of codes and scales."""
    parts = {"codes": quantized.codes, "scale": quantized.scale, "offset": quantized.offset}
    parts["tensor_scale"] = quantized.tensor_scale
    return digest({name: part for name, part in parts.items() if part is not None})


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
