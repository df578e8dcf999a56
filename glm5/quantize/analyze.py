"""Which parts of a model stand fewer bits: one part at a time is quantized, the rest left as it is, and KL measured.

Samples go through the original once, layer by layer. At each layer every part at every width branches off: its output
goes on through the layers that follow, beside the others', so each layer is read once. KLs of parts are taken to add
up; the proposal starts with 4 bits everywhere and gives 8, or the original's, where a bit saves most, up to a budget.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm5.checkpoint.formats.base import scheme_name
from glm5.checkpoint.formats.glm5 import Glm5Format
from glm5.checkpoint.names import place_of
from glm5.common.atomic import atomic_write
from glm5.common.errors import ConfigError
from glm5.common.progress import Progress
from glm5.config.quantize import QuantizeConfig, check_out
from glm5.config.recipe import WeightExt
from glm5.config.tensors import tensor_specs
from glm5.quant.record import INT4_CHANNEL, INT4_GROUP, W4A8, W4A16, W8A8, Scheme
from glm5.quantize.calibrate import Activations, Pack
from glm5.quantize.job import Job, held_out, prepare
from glm5.quantize.layer import build_layer
from glm5.quantize.measure import Quality, Walk, compare, original
from glm5.quantize.plan import LinearPlan
from glm5.quantize.report import bars, styled, table
from glm5.quantize.source import Layer
from glm5.quantize.weights import Options, quantize_modules

logger = logging.getLogger(__name__)

WIDTHS: tuple[Scheme, ...] = (W8A8, W4A8, W4A16)
KEPT_BITS = 16
_PARTS = {
    "attention": ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"),
    "indexer": ("self_attn.indexer.wq_b",),
    "dense mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "shared expert": tuple(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
    "experts": tuple(f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")),
}
_GLOBS = {
    "attention": ("self_attn.[qko]*_proj*",),
    "indexer": ("self_attn.indexer.wq_b",),
    "dense mlp": ("mlp.*_proj",),
    "shared expert": ("mlp.shared_experts.*",),
    "experts": ("mlp.experts.*",),
}


@dataclass
class Branch:
    """A part of a layer at a width, and the samples behind it."""

    layer_idx: int
    part: str
    scheme: Scheme
    num_weights: int
    samples: Activations
    modules: dict[str, dict[str, float]] = field(default_factory=dict)
    kl: float = 0.0


def analyze(settings: QuantizeConfig, given: Sequence[Sequence[int]] | None = None) -> Path:
    """Write analysis.json, analysis.html and recipe.toml into OUT, and return it. `given`: samples in place of the
    settings' held-out text."""
    assert settings.out is not None
    if not settings.held_out_tokens:
        raise ConfigError("--held-out-tokens: got 0; allowed: above 0, as the analysis measures on them")
    out = check_out(settings.out)
    job = prepare(settings)
    samples = given if given is not None else held_out(job)
    with torch.no_grad():
        branches, quality = _branches(job, samples)
    budget = settings.budget or _average_bits(job) + 0.5
    chosen = propose(branches, budget)
    out.mkdir(parents=True, exist_ok=True)
    found = _document(job, branches, chosen, budget, quality)
    with atomic_write(out / "analysis.json") as file:
        json.dump(found, file, indent=2)
    with atomic_write(out / "analysis.html") as file:
        file.write(_page(found))
    with atomic_write(out / "recipe.toml") as file:
        file.write(recipe_toml(chosen))
    return out


def _branches(job: Job, samples: Sequence[Sequence[int]]) -> tuple[list[Branch], Quality]:
    walk = Walk(job.cfg, original(job), samples)
    branches: list[Branch] = []
    cfg = job.cfg
    longest = max(map(len, samples), default=0)
    parts = dict(_PARTS)
    if longest <= cfg.index_topk:
        del parts["indexer"]
        logger.warning(
            "samples of %d tokens see all of their keys, of which the indexer selects %d: its error would not show: "
            "it is left as it is; a longer --sample-len measures it",
            longest,
            cfg.index_topk,
        )
    with Progress(cfg.num_hidden_layers, "layer", "analyzing") as progress:
        for layer_idx in range(cfg.num_hidden_layers):
            tensors, _ = walk.fetch(layer_idx)
            layer = build_layer(cfg, layer_idx, tensors)
            for branch in branches:
                branch.samples.through([layer], cfg, layer_idx)
            branches += _branch_off(job, layer_idx, tensors, walk.activations, parts)
            walk.activations.through([layer], cfg, layer_idx)
            progress.update(1, branches=len(branches))
    reference = list(walk.log_probs())
    here = walk.activations
    for branch in branches:
        walk.activations = branch.samples
        branch.kl = compare(samples, iter(reference), walk.log_probs(), Quality()).kl
    walk.activations = here
    return branches, compare(samples, iter(reference), iter(reference), Quality())


def _branch_off(
    job: Job, layer_idx: int, tensors: Layer, samples: Activations, parts: Mapping[str, Sequence[str]]
) -> list[Branch]:
    """Every one of `parts` of a layer at every width that its rows divide into."""
    cfg, options = job.cfg, Options(Glm5Format(), job.run.devices, min_tokens=job.settings.min_tokens)
    inputs = samples.inputs([build_layer(cfg, layer_idx, tensors)], cfg, layer_idx)
    found: list[Branch] = []
    for part, modules in parts.items():
        there = [module for module in modules if f"{module}.weight" in tensors]
        weights = [tensors[f"{module}.weight"] for module in there]
        for scheme in WIDTHS if there else ():
            group = scheme.weight.group
            if group is not None and any(weight.shape[-1] % group for weight in weights):
                continue
            held: Layer = dict(tensors) | {f"{m}.weight": tensors[f"{m}.weight"].clone() for m in there}
            linear = LinearPlan(scheme, "ssz" if scheme.weight.bits == 4 else "minmax", WeightExt())
            errors = {m: quantize_modules(options, [m], linear, held, inputs)[m].errors.relative() for m in there}
            branch = Branch(layer_idx, part, scheme, sum(w.numel() for w in weights), _copy(samples), errors)
            acts = dict.fromkeys(there, scheme.act)
            branch.samples.through([build_layer(cfg, layer_idx, held, acts)], cfg, layer_idx)
            found.append(branch)
    return found


def _copy(samples: Activations) -> Activations:
    """Packs of their own over the same tensors, which a layer replaces and never writes to."""
    return Activations([Pack(pack.lengths, pack.hidden_TD, pack.selection) for pack in samples.packs])


def _average_bits(job: Job) -> float:
    """Bits a weight that the run's recipe would take, over all linear layers of the trunk."""
    bits = weights = 0
    for spec in tensor_specs(job.cfg, mtp=False):
        if not spec.fp8:
            continue
        place, size = place_of(spec.name), torch.Size(spec.shape).numel()
        linear = job.run.plan.layer(place.layer_idx).get(place.name.removesuffix(".weight"))
        bits += size * (linear.scheme.weight.bits if linear else KEPT_BITS)
        weights += size
    return bits / weights


def propose(branches: Sequence[Branch], budget: float) -> dict[tuple[int, str], Branch | None]:
    """For each part of each layer the branch to take, None: kept as it is. Greedy: most KL saved a bit, first."""
    options: dict[tuple[int, str], list[Branch]] = {}
    for branch in branches:
        options.setdefault((branch.layer_idx, branch.part), []).append(branch)
    chosen: dict[tuple[int, str], Branch | None] = {
        key: min((b for b in some if b.scheme.weight.bits == 4), key=lambda b: b.kl) for key, some in options.items()
    }
    weights = {key: some[0].num_weights for key, some in options.items()}
    room = (budget - 4) * sum(weights.values())
    while True:
        best, gain = None, 0.0
        for key, now in chosen.items():
            for other in (*options[key], None):
                cost = (_bits(other) - _bits(now)) * weights[key]
                saved = (now.kl if now else 0.0) - (other.kl if other else 0.0)
                if 0 < cost <= room and saved / cost > gain:
                    best, gain = (key, other), saved / cost
        if best is None:
            return chosen
        key, other = best
        room -= (_bits(other) - _bits(chosen[key])) * weights[key]
        chosen[key] = other


def _bits(branch: Branch | None) -> int:
    return KEPT_BITS if branch is None else branch.scheme.weight.bits


def recipe_toml(chosen: Mapping[tuple[int, str], Branch | None]) -> str:
    """A recipe of what is proposed: one step a width, with a pattern for each part of a layer."""
    lines = ["# Proposed by glm5 quantize --analyze.", ""]
    for scheme in WIDTHS:
        places = [key for key, branch in chosen.items() if branch is not None and branch.scheme == scheme]
        if not places:
            continue
        globs = [f"model.layers.{layer_idx}.{glob}" for layer_idx, part in places for glob in _GLOBS[part]]
        not_these = [f"model.layers.{i}.self_attn.kv_b_proj" for i, part in places if part == "attention"]
        lines += ["[[process]]", 'type = "linear_quant"', f"include = {json.dumps(globs)}"]
        lines += [f"exclude = {json.dumps(not_these)}"] if not_these else []
        act = 'qconfig.act = { scope = "per_token", dtype = "int8" }'
        grids = {
            W8A8.weight: 'qconfig.weight = { scope = "per_channel", dtype = "int8", method = "minmax" }',
            INT4_CHANNEL: 'qconfig.weight = { scope = "per_channel", dtype = "int4", method = "ssz" }',
            INT4_GROUP: 'qconfig.weight = { scope = "per_group", dtype = "int4", method = "ssz" }',
        }
        lines += [act] if scheme.act is not None else []
        lines += [grids[scheme.weight], ""]
    return "\n".join(lines)


def _document(
    job: Job,
    branches: Sequence[Branch],
    chosen: Mapping[tuple[int, str], Branch | None],
    budget: float,
    quality: Quality,
) -> dict[str, Any]:
    total = {key: next(b.num_weights for b in branches if (b.layer_idx, b.part) == key) for key in chosen}
    bits = sum(_bits(branch) * total[key] for key, branch in chosen.items()) / sum(total.values())
    return {
        "model": str(job.settings.model),
        "num_tokens": quality.num_tokens,
        "budget": budget,
        "bits": bits,
        "kl_sum": sum(branch.kl for branch in chosen.values() if branch is not None),
        "branches": [
            {
                "layer": b.layer_idx,
                "part": b.part,
                "scheme": scheme_name(b.scheme),
                "bits": b.scheme.weight.bits,
                "kl": b.kl,
                "modules": b.modules,
            }
            for b in branches
        ],
        "proposal": {
            f"model.layers.{layer_idx}: {part}": scheme_name(branch.scheme) if branch else "kept"
            for (layer_idx, part), branch in chosen.items()
        },
        "fallback": [f"model.layers.{layer_idx}: {part}" for (layer_idx, part), b in chosen.items() if _bits(b) > 4],
    }


def as_text(found: Mapping[str, Any]) -> str:
    """For a terminal: KL by part and width, summed over layers, and the proposal."""
    sums: dict[tuple[str, str], float] = {}
    for each in found["branches"]:
        key = (each["part"], each["scheme"])
        sums[key] = sums.get(key, 0.0) + each["kl"]
    lines = [f"{part:14} {scheme:10} KL {kl:.6f} over all layers" for (part, scheme), kl in sums.items()]
    lines.append(
        f"within {found['budget']:.2f} bits a weight: {found['bits']:.2f} bits, KL {found['kl_sum']:.6f} as a sum"
    )
    return "\n".join([*lines, "more than 4 bits for:", *(f"  {name}" for name in found["fallback"])])


def _page(found: Mapping[str, Any]) -> str:
    schemes = list(dict.fromkeys(each["scheme"] for each in found["branches"]))
    body = [f"<h1>{Path(found['model']).name}: what stands fewer bits</h1>"]
    body.append(f"<p>KL to the original of one part quantized at a time, on {found['num_tokens']:,} tokens.</p>")
    for scheme in schemes:
        some = [each for each in found["branches"] if each["scheme"] == scheme]
        body.append(f"<h2>{scheme}</h2>")
        body.append(bars([f"{e['layer']} {e['part']}" for e in some], [e["kl"] for e in some], slanted=True))
    rows = [
        (
            str(e["layer"]),
            e["part"],
            e["scheme"],
            f"{e['kl']:.6f}",
            module,
            f"{errors['weight']:.4f}",
            f"{errors['output']:.4f}" if "output" in errors else "",
        )
        for e in found["branches"]
        for module, errors in e["modules"].items()
    ]
    body.append(f"<h2>Proposal within {found['budget']:.2f} bits a weight: {found['bits']:.2f}</h2>")
    body.append(table(("part", "width"), found["proposal"].items()))
    body.append("<h2>All figures</h2>")
    body.append(table(("layer", "part", "width", "KL", "module", "weight error", "output error"), rows))
    return styled("What stands fewer bits", body)
