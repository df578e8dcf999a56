"""`glm5 inspect`: what a checkpoint or a preset holds. For a preset it reads no file and imports no torch."""

import argparse
import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.files import InspectConfig
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.config.tensors import ParameterCount, count_bytes, count_parameters

if TYPE_CHECKING:
    from glm5.checkpoint.inspect import CheckpointReport

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def add(parser: Parser) -> None:
    add_flags(parser, InspectConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(InspectConfig, args)
    if settings.preset is not None:
        cfg = preset(settings.preset)
        out(json.dumps(_preset_dict(settings.preset, cfg)) if settings.json_ else _preset_text(settings.preset, cfg))
        return 0
    assert settings.source is not None
    from glm5.checkpoint.inspect import inspect

    report = inspect(settings.source)
    out(json.dumps(report.to_dict()) if settings.json_ else _report_text(report))
    return 0 if report.loads else 1


def _preset_dict(name: str, cfg: ModelConfig) -> dict[str, Any]:
    """The keys of a checkpoint's report, for a BF16 checkpoint of this architecture."""
    by_dtype, by_part = _sums(count_bytes(cfg, fp8=False))
    return {
        "source": f"preset {name}",
        "parameters": asdict(count_parameters(cfg)),
        "num_bytes": by_dtype.total(),
        "num_bytes_as_fp8": count_bytes(cfg, fp8=True).total(),
        "bytes_by_dtype": dict(by_dtype.most_common()),
        "bytes_by_part": dict(by_part.most_common()),
        "unknown_config_keys": sorted(cfg.extra),
        "config": cfg.to_dict(),
    }


def _preset_text(name: str, cfg: ModelConfig) -> str:
    by_dtype, by_part = _sums(count_bytes(cfg, fp8=False))
    fp8_bytes = count_bytes(cfg, fp8=True).total()
    return "\n".join(
        [
            f"preset {name}",
            *_architecture(cfg),
            *_parameters(count_parameters(cfg)),
            *_bytes("as a BF16 checkpoint", by_dtype, by_part),
            f"as an FP8 checkpoint  {_size(fp8_bytes)}",
        ]
    )


def _report_text(report: "CheckpointReport") -> str:
    title = f"bytes of {report.num_tensors:,} tensors in {report.num_files} file{'s' * (report.num_files != 1)}"
    lines = [report.source, *_architecture(report.cfg), *_parameters(report.parameters)]
    lines += _bytes(title, Counter(report.bytes_by_dtype), Counter(report.bytes_by_part))
    if report.quantization_aware is not None:
        lines.append(f"trained with quantization in view (quantization_aware)  {json.dumps(report.quantization_aware)}")
    if report.unknown_config_keys:
        lines.append(f"unknown config keys, kept  {', '.join(report.unknown_config_keys)}")
    fit = report.fit
    lines += [f"ignored     {line}" for line in fit.ignored]
    lines += [f"damaged     {line}" for line in fit.damage]
    for kind in ("missing", "unexpected", "misshaped", "unreadable"):
        lines += [f"{kind:<11} {line}" for line in getattr(fit, kind)]
    lines.append("it loads" if report.loads else "it would not load, for the reasons above")
    return "\n".join(lines)


def _architecture(cfg: ModelConfig) -> list[str]:
    layers = range(cfg.num_hidden_layers)
    num_moe = sum(cfg.is_moe(i) for i in layers)
    num_full = sum(cfg.has_indexer(i) for i in layers)
    num_dense, num_shared = cfg.num_hidden_layers - num_moe, cfg.num_hidden_layers - num_full
    mtp = " + 1 MTP" if cfg.num_nextn_predict_layers else ""
    return [
        f"layers      {cfg.num_hidden_layers}{mtp}: {num_dense} dense, {num_moe} MoE",
        f"attention   {cfg.num_attention_heads} heads of {cfg.qk_nope_head_dim} + {cfg.qk_rope_head_dim} rotary",
        f"            value {cfg.v_head_dim}; ranks q {cfg.q_lora_rank}, kv {cfg.kv_lora_rank}",
        f"indexer     {cfg.index_n_heads} heads of {cfg.index_head_dim}, top {cfg.index_topk} keys",
        f"            in {num_full} layers; {num_shared} share the selection before",
        f"experts     {cfg.n_routed_experts} of width {cfg.moe_intermediate_size}",
        f"            {cfg.num_experts_per_tok} a token, {cfg.n_shared_experts} shared",
        f"width       {cfg.hidden_size}, dense MLP {cfg.intermediate_size}, vocabulary {cfg.vocab_size:,}",
        f"positions   {cfg.max_position_embeddings:,}, theta {cfg.rope_theta:g}",
        f"norms       eps {cfg.rms_norm_eps:g}, low-rank {cfg.lora_norm_eps:g}",
    ]


def _parameters(count: ParameterCount) -> list[str]:
    return [
        "parameters",
        f"  {count.total:>19,}  without MTP",
        f"  {count.with_mtp:>19,}  with MTP",
        f"  {count.active:>19,}  active per token (without MTP, embedding and lm_head)",
        f"  {count.biases:>19,}  router biases besides (float32)",
        *(f"  {number:>19,}  {part}" for part, number in Counter(count.by_part).most_common()),
    ]


def _bytes(title: str, by_dtype: Counter[str], by_part: Counter[str]) -> list[str]:
    return [
        f"{title}  {_size(by_dtype.total())}",
        *(f"  {number:>19,}  {dtype}" for dtype, number in by_dtype.most_common()),
        *(f"  {number:>19,}  {part}" for part, number in by_part.most_common()),
    ]


def _size(num_bytes: int) -> str:
    unit, name = next((unit for unit in UNITS if num_bytes >= unit[0]), UNITS[-1])
    return f"{num_bytes:,} bytes ({num_bytes / unit:.4g} {name})"


def _sums(num_bytes: Counter[Any]) -> tuple[Counter[str], Counter[str]]:
    """Sums by dtype and by part."""
    by_dtype, by_part = Counter[str](), Counter[str]()
    for (dtype, part), number in num_bytes.items():
        by_dtype[dtype] += number
        by_part[part] += number
    return by_dtype, by_part
