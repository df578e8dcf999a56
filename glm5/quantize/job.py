"""A run with everything decided before anything is written: recipe, plan, format, rotations, devices, samples."""

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.formats import choose
from glm5.checkpoint.formats.base import Stored
from glm5.checkpoint.names import STACK, name_of, place_of
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.quantize import QuantizeConfig
from glm5.config.recipe import QuaRot
from glm5.quant.graph import RotationName
from glm5.quant.hadamard import Rotation
from glm5.quant.qat import GROUP, KEY
from glm5.quant.record import Grid, Scheme
from glm5.quant.rotate import rotations
from glm5.quantize.calibration_text import samples
from glm5.quantize.devices import parse_devices
from glm5.quantize.plan import Plan, make_plan, unmatched
from glm5.quantize.quantize_layer import Run, refuse_int4
from glm5.quantize.recipe import Resolved, resolve
from glm5.quantize.source import Source

logger = logging.getLogger(__name__)

HELD_OUT = 1_000_003  # what its seeds differ by from calibration's


@dataclass(frozen=True)
class Job:
    """A run with everything decided: what `quantize` goes through."""

    settings: QuantizeConfig
    resolved: Resolved
    source: Source
    run: Run
    cfg: ModelConfig
    """Of what is written: without the MTP layer where that is dropped."""

    def stored(self, module: str) -> Stored:
        """The tensors of a quantized module, which has this name on disk."""
        place = place_of(f"{module}.weight")
        scheme = self.run.plan.layer(place.layer_idx)[place.name.removesuffix(".weight")].scheme
        rows, columns = self.source.fit.specs[f"{module}.weight"].shape
        return self.run.format.layout(module, scheme, (rows, columns))

    @property
    def max_shard_gb(self) -> float:
        """Largest file of weights."""
        given = self.settings.max_shard_gb
        return self.resolved.recipe.max_shard_gb if given is None else given

    @property
    def remarks(self) -> list[str]:
        """What has to be known to read the measurement, a sentence each."""
        has_words = (self.source.directory / "tokenizer.json").is_file()
        made = "sentences, sums and code made by rule" if has_words else "random ids, for want of a tokenizer"
        where = self.settings.held_out
        found = [f"measured on {made}; --held-out takes a file" if where == "generated" else f"measured on {where}"]
        if KEY in self.source.cfg.extra:
            found.append(
                "the original here is the unrounded masters, with which training never computed: what was written is "
                "what it computed with, to the bit"
            )
        return found


def prepare(settings: QuantizeConfig, resolved: Resolved | None = None) -> Job:
    """Decide everything, reading headers and one expert. Errors here come before anything is written. `resolved`: a
    recipe in place of the settings'."""
    source = Source(settings.model)
    if settings.out is not None:
        source.check_output(Path(settings.out))
    resolved = resolved or resolve(settings)
    for note in resolved.notes:
        logger.info("%s", note)
    plan = make_plan(source.cfg, resolved.recipe, resolved.target)
    if settings.recipe is not None:
        for pattern in unmatched(source.cfg, resolved.recipe):
            logger.warning("%s: the pattern %s fits no module of this model", settings.recipe, pattern)
    if KEY in source.cfg.extra and not _rounds_as_trained(plan):
        target = "" if resolved.target == "glm5" else f" --target {resolved.target}"
        tokens_too = "; --recipe recipes/w4a8-aware.toml in place of both for w4a8 with the targets glm5 and gguf"
        raise ConfigError(
            f"{settings.model}: trained with quantization in view ({KEY} in config.json), so its weights have to "
            f"be rounded as they were in training, got {resolved.name}; allowed: glm5 quantize "
            f"{shlex.quote(settings.model)} {shlex.quote(str(settings.out))} --scheme w4a16 --method minmax{target}"
            f"{tokens_too}"
        )
    rotation = resolved.recipe.rotation
    run = Run(
        cfg=source.cfg,
        plan=plan,
        format=choose(plan.target, plan.schemes),
        rotations={} if rotation is None else _rotations(source.cfg, rotation, upstream=settings.upstream_faithful),
        dtype=getattr(torch, settings.compute_dtype),
        devices=parse_devices(settings.device),
        upstream=settings.upstream_faithful,
        all_experts=settings.calibrate_all_experts,
        min_tokens=settings.min_tokens,
    )
    _refuse_trained_experts(run, source)
    run.format.check(source.cfg, source.directory, plan.schemes)
    drops = settings.mtp == "drop" and source.cfg.num_nextn_predict_layers > 0
    cfg = source.cfg.replace(num_nextn_predict_layers=0) if drops else source.cfg
    return Job(settings, resolved, source, run, cfg)


def _rounds_as_trained(plan: Plan) -> bool:
    """Whether a plan does to experts what training with int4 in view did: groups of 128, by min-max, and nothing is
    turned or smoothed before. Whatever else it quantizes, and tokens, keep 8 bits."""
    trained = Grid("int", 4, "group", GROUP)

    def fits(layer_idx: int, module: str, scheme: Scheme) -> bool:
        is_trained = module.startswith(STACK) and layer_idx < plan.cfg.num_hidden_layers
        return scheme.weight == trained if is_trained else scheme.weight.bits == 8

    return plan.recipe.is_plain and all(
        fits(layer_idx, module, linear.scheme)
        for layer_idx, linears in plan.linears.items()
        for module, linear in linears.items()
    )


def _refuse_trained_experts(run: Run, source: Source) -> None:
    """Refuse experts on int4's grid that the checkpoint does not mark. The first planned expert is checked here,
    because a run would reach it minutes later."""
    for layer_idx, linears in sorted(run.plan.linears.items()):
        stacks = {module: linear for module, linear in linears.items() if module.startswith(STACK)}
        for module, linear in stacks.items():
            expert = source.tensor(name_of(layer_idx, f"{module}.weight", expert=0))
            refuse_int4(run, layer_idx, module, linear, expert)
        if stacks:
            return


def _rotations(cfg: ModelConfig, rotation: QuaRot, *, upstream: bool) -> dict[RotationName, Rotation]:
    """Those that a recipe's quarot asks for."""
    wanted: dict[RotationName, bool] = {
        "residual": rotation.residual,
        "q latent": rotation.latents,
        "kv latent": rotation.latents,
        "value heads": rotation.heads,
    }
    return rotations(cfg, [name for name, on in wanted.items() if on], rotation.seed or 0, upstream=upstream)


def calibration(job: Job, given: Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]] | None:
    """Samples of token ids; None where no step needs any."""
    if not job.resolved.recipe.needs_text:
        return None
    if given is not None:
        return given
    where = job.resolved.recipe.dataset or job.settings.calibration
    return read_samples(job, where, job.settings.num_samples, job.settings.sample_len, job.settings.seed)


def held_out(job: Job) -> list[list[int]]:
    """Samples for the report, other ones than calibration's where both are generated."""
    settings = job.settings
    each = min(settings.sample_len, settings.held_out_tokens)
    return read_samples(job, settings.held_out, -(-settings.held_out_tokens // each), each, settings.seed + HELD_OUT)


def read_samples(job: Job, where: str, num_samples: int, sample_len: int, seed: int) -> list[list[int]]:
    """Token ids of a text, by the checkpoint's tokenizer."""
    folder = job.source.directory
    tokenizer = Tokenizer.from_dir(folder) if (folder / "tokenizer.json").is_file() else None
    longest = min(sample_len, job.cfg.max_position_embeddings)
    sizes = {"num_samples": num_samples, "sample_len": longest}
    return samples(where, tokenizer, job.cfg.vocab_size, seed=seed, **sizes)
