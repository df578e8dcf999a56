"""`glm5 quantize`: all layers, one after the other, into a folder that appears when everything is verified.

    OUTER (embedding, norm, head)   layer 0   ...   the MTP layer        each: read ahead -> work -> write -> mark

What is in memory: the layer at work and the next one as stored, the layer in the run's dtype on the device, and the
calibration activations. The peak is said at the end.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm5.checkpoint.formats.base import Matrix, scheme_name
from glm5.checkpoint.names import OUTER, STACK, name_of
from glm5.checkpoint.save import ASSET_FILES, copy_assets
from glm5.common.atomic import atomic_write
from glm5.common.errors import CheckpointError
from glm5.common.progress import Progress
from glm5.config.quantize import QuantizeConfig, check_out
from glm5.quant.record import Quantized
from glm5.quantize.calibrate import Activations
from glm5.quantize.devices import peak_memory
from glm5.quantize.drafts import draft_tensors
from glm5.quantize.gguf_store import GgufStore
from glm5.quantize.job import Job, calibration, held_out, prepare
from glm5.quantize.measure import measure
from glm5.quantize.quantize_layer import LayerResult, quantize_layer, rotated
from glm5.quantize.recipe import Resolved
from glm5.quantize.report import document, write_report
from glm5.quantize.store import FILES, Store, digest, digest_of, held, root_of
from glm5.quantize.verify import THREADS, verify
from glm5.quantize.weights import part_of

logger = logging.getLogger(__name__)


def quantize(
    settings: QuantizeConfig, given: Sequence[Sequence[int]] | None = None, resolved: Resolved | None = None
) -> Path:
    """Quantize a checkpoint; returns OUT. `given`: calibration samples of token ids in place of the settings' text;
    `resolved`: a recipe in place of the settings'.

    Goes on where the same command was cut off. Raises ConfigError or CheckpointError with OUT untouched.
    """
    assert settings.out is not None
    out = check_out(settings.out)
    job = prepare(settings, resolved)
    chosen = calibration(job, given)
    try:
        with held(root_of(out)):
            store = _opened(job, out, chosen)
            _layers(job, store, chosen)
            _finish(job, store)
    except OSError as error:
        raise CheckpointError(
            f"{out}: writing failed: {error.strerror or error}; what is done is kept in "
            f"{root_of(out)}: mend that and give the same command to go on"
        ) from error
    host, device = peak_memory(job.run.devices)
    logger.info("%s: written; at most %.2f GB of host memory, %s", out, host / 1e9, device)
    return out


def _opened(job: Job, out: Path, chosen: Sequence[Sequence[int]] | None) -> Store:
    fingerprint, restart = _fingerprint(job, chosen), job.settings.restart
    if job.resolved.target == "gguf":
        return GgufStore(job, out, fingerprint, restart=restart)
    return Store(out, fingerprint, restart=restart)


def _layers(job: Job, store: Store, chosen: Sequence[Sequence[int]] | None) -> None:
    """Every layer that is not done yet."""
    wanted = [i for i in job.source.layer_indices if i < job.cfg.num_layers_with_mtp]
    waiting = [i for i in wanted if i not in store.layers]
    activations = _resumed(job, store, chosen, waiting)
    _check_room(job, store, waiting)
    with Progress(len(wanted), "layer", f"quantizing {job.source.directory.name}") as progress:
        progress.update(len(wanted) - len(waiting))
        for layer_idx, stored in job.source.ahead(waiting):
            if layer_idx == OUTER:
                result, activations = _outer(job, stored, chosen)
            else:
                result = quantize_layer(job.run, layer_idx, stored, activations)
            write(job, store, result, activations)
            host, _ = peak_memory(job.run.devices)
            progress.update(1, **{"host GB": round(host / 1e9, 2)})


def _resumed(
    job: Job, store: Store, chosen: Sequence[Sequence[int]] | None, waiting: Sequence[int]
) -> Activations | None:
    """The samples behind the last layer that is done; None where nothing is, or where nothing needs them."""
    done = [i for i in store.layers if i < job.cfg.num_hidden_layers]
    if chosen is None or not done or not waiting:
        return None
    logger.info("going on behind %d layers that are done", len(store.layers))
    empty = torch.empty(1, 1, dtype=job.run.dtype, device=job.run.device).expand(job.cfg.vocab_size, 1)
    activations = Activations.embed(chosen, empty, job.run.devices)
    if max(waiting) < job.cfg.num_hidden_layers or len(done) <= job.cfg.num_hidden_layers:
        store.restore(max(done), activations)
    return activations


def _outer(
    job: Job, stored: dict[str, Tensor], chosen: Sequence[Sequence[int]] | None
) -> tuple[LayerResult, Activations | None]:
    dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    held = rotated(job.run, stored)
    plain = {name: tensor.to(dtypes[name]) for name, tensor in held.items()}
    activations = None
    if chosen is not None:
        table = plain["model.embed_tokens.weight"].to(job.run.dtype)
        activations = Activations.embed(chosen, table, job.run.devices)
    return LayerResult(OUTER, {name: tensor.cpu() for name, tensor in plain.items()}, {}), activations


def write(job: Job, store: Store, result: LayerResult, activations: Activations | None) -> None:
    """A layer's tensors in the run's format, and the mark that it is done."""
    run, layer_idx = job.run, result.layer_idx
    tensors: dict[str, Tensor] = {}
    for name, tensor in result.plain.items():
        for disk, one in _by_expert(layer_idx, name, tensor):
            tensors |= run.format.write_plain(job.cfg, disk, one)
    schemes: dict[str, str] = {}
    digests: dict[str, str] = {}
    for module, quantized in result.quantized.items():
        for matrix in _packed(job, layer_idx, module, quantized, result.input_amax.get(module)):
            tensors |= matrix.tensors
            schemes |= dict.fromkeys(matrix.tensors, matrix.scheme)
            digests[matrix.module] = matrix.digest
    if layer_idx == job.cfg.num_hidden_layers or layer_idx == OUTER:
        tensors |= draft_tensors(job.source, run, layer_idx, job.cfg)
    entry = store.write_layer(layer_idx, tensors, int(job.max_shard_gb * 1e9))
    entry |= {
        "schemes": schemes,
        "digests": digests,
        "plain": digest_plain(tensors, schemes),
        "figures": result.metrics,
    }
    store.done(layer_idx, entry, activations)


class _Packed(NamedTuple):
    """One matrix as it goes to a file."""

    module: str
    scheme: str
    tensors: dict[str, Tensor]
    digest: str


def _packed(job: Job, layer_idx: int, module: str, quantized: Quantized, amax: Tensor | None) -> Iterator[_Packed]:
    """A module's matrices, experts side by side on several threads: packing and digests take as long as the disk."""
    scheme = job.run.plan.layer(layer_idx)[module].scheme

    def pack(expert: int | None) -> _Packed:
        one, disk = part_of(quantized, expert), name_of(layer_idx, module, expert)
        largest = None if amax is None else amax[expert if expert is not None and len(amax) > 1 else 0].item()
        found = job.run.format.write(Matrix(disk, one, scheme, largest))
        return _Packed(disk, scheme_name(scheme), found, digest_of(one))

    with ThreadPoolExecutor(THREADS) as threads:
        yield from threads.map(pack, range(len(quantized.codes)) if module.startswith(STACK) else (None,))


def digest_plain(tensors: dict[str, Tensor], schemes: dict[str, str]) -> dict[str, str]:
    """Of each tensor that is not quantized."""
    return {name: digest({name: tensor}) for name, tensor in tensors.items() if name not in schemes}


def _by_expert(layer_idx: int, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    if not name.startswith(STACK):
        return [(name_of(layer_idx, name), tensor)]
    return [(name_of(layer_idx, name, expert), one) for expert, one in enumerate(tensor)]


def _check_room(job: Job, store: Store, waiting: Sequence[int]) -> None:
    """A first guess, so that a disk that is far too small is said at once: codes and what stays."""
    num_bytes = 0
    for layer_idx in waiting:
        linears = job.run.plan.layer(layer_idx)
        for spec in job.source.specs(layer_idx):
            module = spec.name.removesuffix(".weight").removeprefix(f"model.layers.{layer_idx}.")
            linear = linears.get(module) or linears.get(_as_stack(module))
            bits = linear.scheme.weight.bits if linear else 8 * job.source.dtype_of(spec.name).itemsize
            num_bytes += torch.Size(spec.shape).numel() * bits // 8
    free = shutil.disk_usage(store.root).free
    if num_bytes > free:
        raise CheckpointError(f"{store.out}: needs about {num_bytes:,} bytes more, and {free:,} are free there")


def _as_stack(module: str) -> str:
    head, _, leaf = module.rpartition(".")
    return f"{STACK}{leaf}" if head.startswith("mlp.experts.") else module


def _fingerprint(job: Job, chosen: Sequence[Sequence[int]] | None) -> dict[str, Any]:
    """What decides the bytes: settings as resolved, the source's headers, when its files were written, and samples."""
    settings = job.settings
    files = {entry.file for entry in job.source.index.entries.values()}
    written = {name: (job.source.directory / name).stat().st_mtime_ns for name in sorted(files)}
    headers = [[e.name, e.dtype, e.shape, e.file, e.start] for e in job.source.index.entries.values()]
    return {
        "recipe": job.resolved.recipe.model_dump(mode="json"),
        "target": job.resolved.target,
        "mtp": settings.mtp,
        "upstream_faithful": settings.upstream_faithful,
        "calibrate_all_experts": settings.calibrate_all_experts,
        "min_tokens": settings.min_tokens,
        "compute_dtype": settings.compute_dtype,
        "device": [device.type for device in job.run.devices[:1]],
        "max_shard_gb": job.max_shard_gb,
        FILES: hashlib.sha256(json.dumps([job.source.cfg.to_dict(), headers, written]).encode()).hexdigest(),
        "samples": hashlib.sha256(json.dumps(chosen).encode()).hexdigest(),
    }


def _finish(job: Job, store: Store) -> None:
    """Files beside the weights, the verification, and the last names."""
    stored = {name: "" for _, names in store.files() for name in names}
    for entry in store.layers.values():
        stored |= entry["schemes"]
    chosen, schemes = job.run.format, job.run.plan.schemes
    extra_files = chosen.files(job.source.cfg, schemes, stored)
    config = job.cfg.to_dict()
    config.pop("quantization_config", None)
    if (quantization := chosen.config(job.source.cfg, schemes)) is not None:
        config["quantization_config"] = quantization
    if any((job.source.directory / name).is_file() for name in ASSET_FILES):
        copy_assets(job.source.directory, store.model)
    for name, content in {"config.json": config, **extra_files}.items():
        with atomic_write(store.model / name) as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
            file.write("\n")
    num_verified = verify(job, store)
    quality = None
    if job.settings.held_out_tokens:
        quality = measure(job, store.model, held_out(job))
        logger.info(
            "KL %.5f, same most likely token %.2f %%, perplexity %.4f (original %.4f) on %d held-out tokens",
            quality.kl,
            100 * quality.top1,
            quality.perplexity,
            quality.perplexity_before,
            quality.num_tokens,
        )
        for remark in job.remarks:
            logger.info("%s", remark)
    host, _ = peak_memory(job.run.devices)
    write_report(store.model, document(job, store, quality, num_verified, host))
    store.finish(chosen.shard_prefix)
