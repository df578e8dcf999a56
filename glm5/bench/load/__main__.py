"""A table of rates: reading alone, then loading by each number of ranks."""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from glm5.bench.command import command, need_gpus
from glm5.checkpoint.init import write_random
from glm5.checkpoint.load import load, num_readers
from glm5.common.console import out
from glm5.common.errors import UsageError
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
        return _be_rank(args.folder, Shard(args.rank, args.ranks[0]), args.device, only_copy=args.only_copy)
    if args.device == "cuda":
        need_gpus("loading onto GPUs", max(args.ranks))
    if not (args.folder / "config.json").exists():
        write_random(sized(args.gigabytes), args.folder, seed=0, fp8=True)
    files = sorted(args.folder.glob("*.safetensors"))
    out(f"{args.folder}: {sum(path.stat().st_size for path in files) / 1e9:.1f} GB in {len(files)} files")
    _forget(files)
    threads = num_readers(torch.device(args.device))
    rates = [_read_rate(files, threads) for _ in range(2)]
    out(f"only reading, {threads} threads  disk {rates[0]:6.2f} GB/s   memory {rates[1]:6.2f} GB/s", flush=True)
    for ranks in args.ranks:
        _forget(files)
        rates = [_rate(args.folder, ranks, args.device) for _ in range(2)]
        line = f"loading by {ranks:2} on {args.device:5}    disk {rates[0]:6.2f} GB/s   memory {rates[1]:6.2f} GB/s"
        if args.device == "cuda":
            line += f"   the bus alone {_rate(args.folder, ranks, args.device, '--only-copy'):6.2f} GB/s"
        out(line, flush=True)
    return 0


def sized(gigabytes: float) -> ModelConfig:
    """GLM-5 with as many layers, and experts, as fit into so many bytes in FP8. Every tensor has its shape."""
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


def _forget(files: list[Path]) -> None:
    """Drop files from memory, so that they are read from the disk again."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_rate(files: list[Path], threads: int) -> float:
    """GB/s of so many threads."""
    pieces = [(path, start) for path in files for start in range(0, path.stat().st_size, _PIECE)]

    def read(piece: tuple[Path, int]) -> int:
        with piece[0].open("rb", buffering=0) as file:
            return len(os.pread(file.fileno(), _PIECE, piece[1]))

    began = time.monotonic()
    with ThreadPoolExecutor(threads) as readers:
        total = sum(readers.map(read, pieces))
    return total / (time.monotonic() - began) / 1e9


def _rate(folder: Path, ranks: int, device: str, *more: str) -> float:
    """GB/s of all ranks together, until the last has its part. They begin when all have imported what they need."""
    command = [sys.executable, "-m", "glm5.bench.load", "--folder", str(folder), "--device", device, *more]
    pipe = subprocess.PIPE
    others = [
        subprocess.Popen([*command, "--ranks", str(ranks), "--rank", str(rank)], stdin=pipe, stdout=pipe, text=True)
        for rank in range(ranks)
    ]
    for process in others:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n", "a rank has ended; its words are above"
    began = time.monotonic()
    for process in others:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    parts = [process.communicate()[0] for process in others]
    return sum(int(part) for part in parts) / (time.monotonic() - began) / 1e9


def _be_rank(folder: Path, shard: Shard, device: str, *, only_copy: bool) -> int:
    """Load the part of a rank, or copy as much from pinned memory to its GPU as tells the bus's rate."""
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
