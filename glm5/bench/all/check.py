"""Checks before anything is started: this machine, the model and the commands of all parts."""

from collections.abc import Callable, Sequence

import torch

from glm5.bench.all.commands import parts, size_of
from glm5.bench.latency.measure import fitted
from glm5.common.errors import ConfigError, UsageError
from glm5.config.bench import LatencyConfig
from glm5.config.bench_all import BenchAllConfig
from glm5.config.command import Command
from glm5.config.engine import EngineConfig, check_length
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.parallel.table import local_config


def check(settings: BenchAllConfig, parsed: Callable[[Sequence[str]], Command]) -> None:
    """Raises UsageError. `parsed` parses a command line of this package, and raises UsageError itself."""
    gpus = torch.cuda.device_count()
    if settings.preset == "glm-5" and not gpus:
        raise UsageError(
            "--preset: glm-5 needs NVIDIA GPUs, and this machine has none; to try the command: --preset tiny"
        )
    size = size_of(settings, gpus)
    if 0 < gpus < size.gpus:
        raise UsageError(
            f"--tensor-parallel-size: got {size.gpus}; allowed: up to {gpus}, as many GPUs as there are here"
        )
    try:
        cfg = preset(settings.preset, size.layers)
        for part in parts(settings, size, kernels=False):
            _check_settings(settings, cfg, parsed(part.command))
            if part.server:
                _check_settings(settings, cfg, parsed(["serve", "MODEL", *part.server]))
    except ConfigError as error:
        key, colon, text = str(error).partition(": ")
        raise UsageError(f"--{key.replace('_', '-')}{colon}{text}") from None


def _check_settings(settings: BenchAllConfig, cfg: ModelConfig, command: Command) -> None:
    """Raises ConfigError. Only settings of an engine are checked."""
    if not isinstance(command, EngineConfig):
        return
    local_config(cfg, command.tensor_parallel_size)
    check_length(cfg, command.max_model_len)
    longest = command.max_model_len or cfg.max_position_embeddings
    if isinstance(command, LatencyConfig):
        fitted(command, longest)
    elif settings.input_len + settings.output_len > longest:
        raise ConfigError(
            f"output_len: got {settings.output_len}, behind prompts of {settings.input_len} tokens; allowed: together "
            f"up to {longest}, the longest sequence (--engine max-model-len, or the model's own)"
        )
