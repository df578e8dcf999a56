"""How far a quantized model is from what it was made of: both run over held-out text, layer by layer, from their files.

    KL = mean over positions of sum p log(p / q)     top-1: how often both would say the same     perplexity of both

The quantized one computes as engines do: weights as read, inputs of linear layers through their grids. Neither is ever
in memory whole.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.checkpoint.gguf.file import FILE, entries
from glm5.checkpoint.names import OUTER, STACK, name_of, place_of
from glm5.checkpoint.shard import TensorEntry, read_header, read_tensor
from glm5.common.errors import CheckpointError
from glm5.common.progress import Progress
from glm5.config.model import ModelConfig
from glm5.kernels.rms_norm import rms_norm
from glm5.quant.record import Grid
from glm5.quantize.calibrate import Activations
from glm5.quantize.errors import ratio, squares
from glm5.quantize.job import Job
from glm5.quantize.layer import build_layer
from glm5.quantize.source import Layer

Acts = dict[str, Grid | None]
Fetch = Callable[[int], tuple[Layer, Acts]]
"""A layer's tensors in the dtype and on the device of a run, and the grids of inputs by module."""

HEAD_ROWS = 1024


@dataclass
class Quality:
    """What `measure` finds. KL in nats a token, with its standard error over samples."""

    num_tokens: int = 0
    kl: float = 0.0
    kl_error: float = 0.0
    kl_median: float = 0.0
    """Of positions: the mean is all tail, where a router's or an indexer's choice flips."""
    top1: float = 0.0
    perplexity: float = 0.0
    perplexity_before: float = 0.0
    layers: list[float] = field(default_factory=list)
    """Relative RMS of hidden states after each layer."""
    kl_answers: float | None = None
    """KL at the positions that predict an answer's tokens, where a text marks those."""
    perplexity_answers: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Written:
    """The files of a folder, by tensor, and layers of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entries: dict[str, TensorEntry] = {
            entry.name: entry for file in sorted(directory.glob("*.safetensors")) for entry in read_header(file)
        }
        if (gguf := directory / FILE).is_file():
            self.entries = entries(gguf, ModelConfig.from_file(directory))

    def fetch(self, name: str) -> Tensor:
        if name not in self.entries:
            raise CheckpointError(f"{self.directory}: {name} was to be written and is not there")
        return read_tensor(self.directory, self.entries[name])

    def layers(self, job: Job) -> Fetch:
        """Layers as they compute: values of codes, and the grids of inputs."""

        def layer(layer_idx: int) -> tuple[Layer, Acts]:
            linears = job.run.plan.layer(layer_idx)
            tensors: Layer = {}
            names = dict.fromkeys(place_of(spec.name).name for spec in job.source.specs(layer_idx))
            for name in names:
                module = name.removesuffix(".weight")
                stacked = name.startswith(STACK)
                each: list[Tensor] = []
                for expert in range(job.cfg.n_routed_experts) if stacked else (None,):
                    disk = name_of(layer_idx, module, expert)
                    if module in linears:
                        each.append(job.stored(disk).read(self.fetch).dequantize(job.run.dtype))
                    else:
                        each.append(job.run.format.read_plain(name_of(layer_idx, name, expert), self.fetch))
                tensors[name] = torch.stack(each) if stacked else each[0]
            return _placed(job, tensors), {module: linear.scheme.act for module, linear in linears.items()}

        return layer


def original(job: Job) -> Fetch:
    """Layers of what is quantized."""
    return lambda layer_idx: (_placed(job, job.source.layer(layer_idx)), {})


class Walk:
    """Samples on their way through a model, a layer at a time."""

    def __init__(self, cfg: ModelConfig, fetch: Fetch, samples: Sequence[Sequence[int]]) -> None:
        self.cfg, self.fetch = cfg, fetch
        self.outer, _ = fetch(OUTER)
        self.activations = Activations.embed(samples, self.outer["model.embed_tokens.weight"])

    def step(self, layer_idx: int) -> None:
        tensors, acts = self.fetch(layer_idx)
        self.activations.through([build_layer(self.cfg, layer_idx, tensors, acts)], self.cfg, layer_idx)

    def to_end(self) -> "Walk":
        for layer_idx in range(self.cfg.num_hidden_layers):
            self.step(layer_idx)
        return self

    def log_probs(self) -> Iterator[Tensor]:
        """[T, W] float32 of each sample."""
        for pack in self.activations.packs:
            hidden_TD = rms_norm(pack.hidden_TD, self.outer["model.norm.weight"], self.cfg.rms_norm_eps)
            for rows in hidden_TD.split(pack.lengths):
                parts = [F.linear(part, self.outer["lm_head.weight"]).float() for part in rows.split(HEAD_ROWS)]
                yield torch.cat(parts).log_softmax(-1)


def measure(job: Job, directory: Path, samples: Sequence[Sequence[int]]) -> Quality:
    """Both models over the samples; `directory` holds the quantized one's files."""
    with torch.no_grad():
        before = Walk(job.cfg, original(job), samples)
        after = Walk(job.cfg, Written(directory).layers(job), samples)
        quality = Quality()
        residual = job.run.rotations.get("residual")
        with Progress(job.cfg.num_hidden_layers, "layer", "measuring") as progress:
            for layer_idx in range(job.cfg.num_hidden_layers):
                before.step(layer_idx)
                after.step(layer_idx)
                wrong = right = 0.0
                for one, other in zip(before.activations.packs, after.activations.packs, strict=True):
                    want = one.hidden_TD if residual is None else residual.apply(one.hidden_TD)
                    sums = squares(other.hidden_TD, want)
                    wrong, right = wrong + sums[0], right + sums[1]
                quality.layers.append(ratio(wrong, right))
                progress.update(1, error=round(quality.layers[-1], 4))
        return compare(samples, before.log_probs(), after.log_probs(), quality)


def compare(
    samples: Sequence[Sequence[int]],
    before: Iterator[Tensor],
    after: Iterator[Tensor],
    quality: Quality,
    answers: Sequence[Sequence[bool]] | None = None,
) -> Quality:
    """Fill in the figures over all positions, from log-probabilities [T, W] of each sample. `answers`: for each token
    whether it belongs to an answer."""
    sums: list[tuple[float, int]] = []
    every: list[Tensor] = []
    same, num_next, loss, loss_before = 0, 0, 0.0, 0.0
    answer_kl = answer_loss = 0.0
    num_answers = 0
    for idx, (ids, p_TW, q_TW) in enumerate(zip(samples, before, after, strict=True)):
        kl_T = (p_TW.exp() * (p_TW - q_TW)).sum(-1).double()
        sums.append((kl_T.sum().item(), len(ids)))
        every.append(kl_T.cpu())
        same += int((p_TW.argmax(-1) == q_TW.argmax(-1)).sum())
        next_T1 = torch.tensor(ids[1:], device=p_TW.device).unsqueeze(-1)
        loss_T = -q_TW[:-1].gather(-1, next_T1).double().squeeze(-1)
        loss += loss_T.sum().item()
        loss_before -= p_TW[:-1].gather(-1, next_T1).double().sum().item()
        num_next += len(ids) - 1
        if answers is not None:
            marked_T = torch.tensor(answers[idx][1:], device=p_TW.device)
            answer_kl += kl_T[:-1][marked_T].sum().item()
            answer_loss += loss_T[marked_T].sum().item()
            num_answers += int(marked_T.sum())
    total = sum(count for _, count in sums)
    quality.num_tokens, quality.kl = total, sum(kl for kl, _ in sums) / total
    quality.kl_error = math.sqrt(sum((kl - quality.kl * count) ** 2 for kl, count in sums)) / total
    quality.kl_median = torch.cat(every).median().item()
    quality.top1 = same / total
    quality.perplexity = math.exp(min(loss / num_next, 700))
    quality.perplexity_before = math.exp(min(loss_before / num_next, 700))
    if num_answers:
        quality.kl_answers = answer_kl / num_answers
        quality.perplexity_answers = math.exp(min(answer_loss / num_answers, 700))
    return quality


def _placed(job: Job, tensors: Layer) -> Layer:
    """In the run's dtype, on its device; the selection bias is float32 at least."""
    wide = torch.promote_types(torch.float32, job.run.dtype)
    return {
        name: tensor.to(job.run.device, wide if name.endswith("e_score_correction_bias") else job.run.dtype)
        for name, tensor in tensors.items()
    }
