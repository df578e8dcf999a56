"""Prints a line of rates for each number of ranks: loading, and only reading."""

import argparse
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import torch

from glm5.bench.command import command, need_gpus
from glm5.checkpoint.init import write_random
from glm5.checkpoint.load import load, num_readers
from glm5.common.console import out
from glm5.common.errors import GlmError, UsageError
from glm5.common.interrupt import end_with_parent
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.config.tensors import tensor_specs
from glm5.parallel.table import Shard

_PIECE, _PIECES = 16 << 20, 2000
_EXPERTS = (256, 128, 64, 32, 16, 8)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m glm5.bench.load")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=usual)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only-copy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return _rank_main(args.folder, Shard(args.rank, args.ranks[0]), args.device, only_copy=args.only_copy)
    if args.device == "cuda":
        need_gpus("loading onto GPUs", max(args.ranks))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit leaves as little behind as Ctrl-C
    found = _write(args.folder, args.gigabytes)
    files = sorted(args.folder.glob("*.safetensors"))
    out(f"{args.folder}: {sum(path.stat().st_size for path in files) / 1e9:.1f} GB in {len(files)} files, {found}")
    threads = num_readers(torch.device(args.device)) * max(args.ranks)
    _drop_page_cache(files)
    alone = [_read_rate(files, threads) for _ in range(2)]
    for ranks in args.ranks:
        _drop_page_cache(files)
        rates = [_rate(args.folder, ranks, args.device) for _ in range(2)]
        line = f"loading by {ranks:2} on {args.device:5}"
        for where, rate, only in zip(("disk", "memory"), rates, alone, strict=True):
            line += f"  {where} {rate:6.2f} GB/s, only reading {only:6.2f}"
        if args.device == "cuda":
            line += f"  the bus alone {_rate(args.folder, ranks, args.device, '--only-copy'):6.2f}"
        out(line, flush=True)
    return 0


def _write(folder: Path, gigabytes: float) -> str:
    """Write a checkpoint unless it is there. A checkpoint is written atomically, so one that is there is complete."""
    cfg, began = sized(gigabytes), time.monotonic()
    if (folder / "config.json").exists():
        there = ModelConfig.from_file(folder)
        if _num_bytes(there) != _num_bytes(cfg):
            raise UsageError(
                f"--folder: {folder} holds a checkpoint of {_num_bytes(there) / 1e9:.1f} GB, and --gigabytes "
                f"{gigabytes:g} asks for one of {_num_bytes(cfg) / 1e9:.1f}; give another folder, or remove that one"
            )
        return "there already"
    write_random(cfg, folder, seed=0, fp8=True)
    return f"written at {_num_bytes(cfg) / (time.monotonic() - began) / 1e9:.2f} GB/s"


def sized(gigabytes: float) -> ModelConfig:
    """GLM-5 with as many layers, and experts, as fit into `gigabytes` in FP8. Tensors keep their shapes."""
    best = None
    for experts in _EXPERTS:
        for layers in range(1, preset("glm-5").num_hidden_layers + 1):
            cfg = preset("glm-5", layers).replace(n_routed_experts=experts)
            if _num_bytes(cfg) > gigabytes * 1e9:
                break
            if best is None or _num_bytes(cfg) > _num_bytes(best):
                best = cfg
        if best is not None:
            return best
    raise UsageError(f"--gigabytes: got {gigabytes:g}; embeddings and one layer alone take 5")


def _num_bytes(cfg: ModelConfig) -> int:
    return sum(torch.Size(spec.shape).numel() * (1 if spec.fp8 else 2) for spec in tensor_specs(cfg))


def _drop_page_cache(files: list[Path]) -> None:
    """Drop files from the page cache, so that they are read from disk again."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_rate(files: list[Path], threads: int) -> float:
    """GB/s of `threads` threads that read into reused buffers."""
    pieces = [(path, start) for path in files for start in range(0, path.stat().st_size, _PIECE)]
    buffers = SimpleQueue[bytearray]()
    for _ in range(threads):
        buffers.put(bytearray(_PIECE))

    def read(piece: tuple[Path, int]) -> int:
        buffer = buffers.get()
        with piece[0].open("rb", buffering=0) as file:
            num_bytes = os.preadv(file.fileno(), [buffer], piece[1])
        buffers.put(buffer)
        return num_bytes

    began = time.monotonic()
    with ThreadPoolExecutor(threads) as readers:
        total = sum(readers.map(read, pieces))
    return total / (time.monotonic() - began) / 1e9


def _rate(folder: Path, ranks: int, device: str, *more: str) -> float:
    """GB/s of all ranks together, until the last one has its shard. They start after all have finished their
    imports."""
    command = [sys.executable, "-m", "glm5.bench.load", "--folder", str(folder), "--device", device, *more]
    pipe = subprocess.PIPE
    others = [
        subprocess.Popen([*command, "--ranks", str(ranks), "--rank", str(rank)], stdin=pipe, stdout=pipe, text=True)
        for rank in range(ranks)
    ]
    for process in others:
        assert process.stdout is not None
        process.stdout.readline()
    began = time.monotonic()
    for process in others:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # of one that has ended
            process.stdin.write("go\n")
            process.stdin.flush()
    parts = [process.communicate()[0] for process in others]
    if any(process.returncode for process in others):
        raise GlmError(f"loading by {ranks} failed; what a rank said of it is above")
    return sum(int(part) for part in parts) / (time.monotonic() - began) / 1e9


def _rank_main(folder: Path, shard: Shard, device: str, *, only_copy: bool) -> int:
    """Load a rank's shard, or copy pinned memory to its GPU to measure the rate of the bus."""
    end_with_parent(os.getppid())
    where = torch.device(f"cuda:{shard.rank}" if device == "cuda" else device)
    torch.empty(1, device=where)
    pinned = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) if only_copy else None
    out("here", flush=True)
    sys.stdin.readline()
    read: list[int] = []
    if pinned is None:
        load(folder, device=where, shard=shard, on_read=lambda num_bytes, _seconds: read.append(num_bytes))
    else:
        there = torch.empty(_PIECE, dtype=torch.uint8, device=where)
        for _ in range(_PIECES):
            there.copy_(pinned, non_blocking=True)
        read.append(_PIECES * _PIECE)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    out(str(read[0]), flush=True)
    os._exit(0)  # giving the memory back takes longer than what is measured


if __name__ == "__main__":
    sys.exit(command(main))
