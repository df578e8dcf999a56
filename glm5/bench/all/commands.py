"""The parts, their commands and their expected seconds (the targets of the full model on eight H200)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.common.errors import ConfigError
from glm5.config.bench_all import BenchAllConfig
from glm5.config.presets import preset

DEPTH, ACCEPTED = 3, 2.99
# By number of GPUs. Each GPU has the share of the model that it would have among eight.
NAMES = {8: "whole_tp8", 4: "half_tp4", 2: "quarter_tp2", 1: "eighth_tp1"}
_SERVE_SECONDS = {1: 45, 8: 70, 16: 90, 32: 125, 64: 160, 128: 280}  # for eight requests a client
_START_SECONDS = 60
_BRIEF = 64  # steps timed with shared indices


def read(path: Path) -> dict[str, Any]:
    """The JSON object in a file of results. Raises ConfigError if it has none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as results: {error}; mend it, or move it away") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no JSON object; mend it, or move it away")
    return document


@dataclass(frozen=True)
class BenchCommand:
    """A command that writes a file of results in about `seconds`. With `clients`, it measures a server, which is
    started first with the flags `server`. The server's port and file paths are left out: results do not depend on
    them."""

    name: str
    command: tuple[str, ...]
    seconds: float
    clients: int | None = None
    server: tuple[str, ...] = ()

    @property
    def total_seconds(self) -> float:
        """Expected seconds, including the start of its server."""
        return self.seconds + (_START_SECONDS if self.server else 0)


@dataclass(frozen=True)
class Size:
    """What is measured: `layers` of a preset on `gpus`, under the entry `name`."""

    name: str
    preset: str
    gpus: int
    layers: int


def size_of(settings: BenchAllConfig, gpus: int) -> Size:
    """The share of the model that the GPUs in use would have among eight. `gpus`: the number in this machine."""
    used = settings.tensor_parallel_size or gpus or 1
    num_layers = preset(settings.preset).num_hidden_layers
    layers = settings.num_hidden_layers or min(num_layers, max(1, round(num_layers * used / 8)))
    return Size(NAMES.get(used, f"tp{used}"), settings.preset, used, layers)


def engine_flags(settings: BenchAllConfig, size: Size) -> list[str]:
    """Flags that every engine gets."""
    max_num_seqs = max(*settings.batch, *settings.max_concurrency)
    given = [f"--{flag}" for flag in settings.engine]
    flags = ["--load-format", "dummy", "--tensor-parallel-size", str(size.gpus), "--max-num-seqs", str(max_num_seqs)]
    return [*flags, *given]


def parts(settings: BenchAllConfig, size: Size, *, kernels: bool) -> list[BenchCommand]:
    """All parts, in order."""
    latency = ["bench", "latency", "--num-hidden-layers", str(size.layers), *engine_flags(settings, size)]
    latency += ["--input-len", str(settings.input_len)]
    batches, contexts = ([str(number) for number in numbers] for numbers in (settings.batch, settings.context))
    drafts = ["--num-speculative-tokens", str(DEPTH), "--simulate-acceptance", str(ACCEPTED)]
    sizes = ["--batch", *batches, "--context", *contexts]
    half = ["--output-len", str(max(1, settings.output_len // 2))]
    commands = [BenchCommand("steps", (*latency, "--preset", settings.preset, *half, *drafts, *sizes), 180)]
    load = ["bench", "serve", "--vocab-size", str(preset(settings.preset).vocab_size)]
    load += ["--random-input-len", str(settings.input_len), "--random-output-len", str(settings.output_len)]
    served = tuple(server_flags(settings, size))
    for clients in settings.max_concurrency:
        seconds = _SERVE_SECONDS.get(clients, 300) * settings.requests / 8
        number = ["--max-concurrency", str(clients), "--num-prompts", str(clients * settings.requests)]
        command = (*load, *number, "--seed", str(clients))
        commands.append(BenchCommand(f"serve-{clients}", command, seconds, clients, served))
    if settings.preset == "glm-5":
        brief = ["--preset", "glm-5.2", "--num-speculative-tokens", "0", "--output-len", str(_BRIEF)]
        commands.append(BenchCommand("shared", (*latency, *brief, *sizes), 80))
    if kernels:
        commands.append(BenchCommand("kernels", ("bench", "kernels"), 120))
    return commands


def server_flags(settings: BenchAllConfig, size: Size) -> list[str]:
    """Flags of `glm5 serve`. Drafts are off, as they were for the published results."""
    flags = [*engine_flags(settings, size), "--num-speculative-tokens", "0", "--no-enable-prefix-caching"]
    return ["--host", "127.0.0.1", "--log-level", "warning", *flags]
