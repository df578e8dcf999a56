"""Quantizes one MoE layer of full size by the complete pipeline: `python -m glm5.bench.quant.layer FOLDER`.

Writes a checkpoint of one layer with random weights (9.7 billion for GLM-5, 19.5 GB in bfloat16) into FOLDER and
quantizes it as `glm5 quantize --scheme w4a8` does, from files to verified files. Prints seconds by function, peak
memory and a projection to all 75 such layers, on one GPU and on several that split the experts. The projection assumes
that each layer is read while the one before is quantized.
"""

import argparse
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from glm5.bench.command import command
from glm5.checkpoint.dummy import dummy
from glm5.checkpoint.save import save
from glm5.common.console import out
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.config.quantize import QuantizeConfig
from glm5.quantize import quantize_layer, run
from glm5.quantize.calibrate import Activations
from glm5.quantize.devices import parse_devices, peak_memory
from glm5.quantize.source import Source

LAYERS = 75  # with experts, of GLM-5
_VOCAB = 4096
# The timed functions and their owners. Several GPUs divide the work of the first group. The next layer is read
# meanwhile.
_DIVIDED = (
    (quantize_layer, "smooth_layer"),
    (quantize_layer, "quantize_modules"),
    (Activations, "inputs"),
    (Activations, "through"),
)
_UNDIVIDED = ((quantize_layer, "rotated"), (run, "write"), (run, "verify"))
_READ = (Source, "layer")


def one_layer(name: str) -> ModelConfig:
    """A preset's first MoE layer alone, without MTP and with a small vocabulary."""
    cfg = preset(name)
    small = {"vocab_size": min(_VOCAB, cfg.vocab_size), "eos_token_id": [1], "pad_token_id": 0}
    one = {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"], "indexer_types": ["full"]}
    return cfg.replace(**one, **small, num_nextn_predict_layers=0, first_k_dense_replace=0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m glm5.bench.quant.layer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default="glm-5")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=42, help="of calibration")
    parser.add_argument("--sample-len", type=int, default=2048)
    parser.add_argument("--weights", choices=["channel", "group"], default="channel")
    parser.add_argument("--gpus", type=int, default=8, help="that the projection is for")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cfg = one_layer(args.preset)
    used = parse_devices(args.device)
    began = time.monotonic()
    source = save(dummy(cfg, fp8=False, device=used[0]), args.folder / "model")
    if used[0].type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(used[0])
    out(f"{source}: written in {time.monotonic() - began:.1f} s")
    settings: dict[str, Any] = {"model": str(source), "out": str(args.folder / "w4a8"), "scheme": "w4a8"}
    settings |= {"device": args.device, "w4a8_weights": args.weights, "held_out_tokens": 0, "restart": True}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, cfg.vocab_size, (args.samples, args.sample_len), generator=generator).tolist()
    began = time.monotonic()
    with _watched(used) as parts:
        run.quantize(QuantizeConfig.model_validate(settings), ids)
    seconds = time.monotonic() - began
    host, device = peak_memory(used)
    names = [name for _, name in (_READ, *_UNDIVIDED, *_DIVIDED)]
    out(f"{seconds:.1f} s: " + ", ".join(f"{name} {parts[name]:.1f}" for name in names))
    out(f"at most {host / 1e9:.1f} GB of host memory, {device}")
    divided, read = sum(parts[name] for _, name in _DIVIDED), parts[_READ[1]]
    whole, shared = (LAYERS * max(read, seconds - read - divided + divided / n) / 60 for n in (1, args.gpus))
    out(f"{LAYERS} layers: {whole:.0f} minutes on one GPU, {shared:.0f} on {args.gpus} of one process")
    return 0


@contextmanager
def _watched(used: Sequence[torch.device]) -> Iterator[dict[str, float]]:
    """Measure seconds in each of the pipeline's functions, including the GPU work that they enqueue."""
    seconds: dict[str, float] = defaultdict(float)

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run_watched(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = function(*args, **kwargs)
            for device in used:
                if device.type == "cuda" and name != _READ[1]:
                    torch.cuda.synchronize(device)
            seconds[name] += time.monotonic() - began
            return result

        return run_watched

    before = [(owner, name, getattr(owner, name)) for owner, name in (_READ, *_UNDIVIDED, *_DIVIDED)]
    for owner, name, function in before:
        setattr(owner, name, watched(name, function))
    try:
        yield seconds
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


if __name__ == "__main__":
    sys.exit(command(main))
