"""The resolved settings of an engine, line by line, for display."""

from typing import Any

import torch

from glm5.config.engine import EngineConfig
from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache, Layout
from glm5.engine.core.pace import PromptShare
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.kernels import cpu_layer
from glm5.kernels.dispatch import TABLES
from glm5.kernels.invariant import impl_on
from glm5.model.experts import QuantizedExperts
from glm5.model.glm5 import Glm5
from glm5.model.lowering import weight_kinds
from glm5.model.moe import MoE

_OPS = ("rms_norm", "rope", "top_k", "store_rows", "select_keys", "sparse_mla")


def start_table(
    config: EngineConfig,
    model: Glm5,
    cache: KVCache,
    max_model_len: int,
    depth: int,
    prompt_share: PromptShare,
    scheduler: SchedulerConfig,
    *,
    is_native: bool,
) -> list[tuple[str, str]]:
    """Every resolved setting: (name, description)."""
    cfg = model.cfg
    on, off = "on", "off"
    kinds = weight_kinds(model)
    weights = f"{', '.join(kinds)} weights, " if kinds else ""
    number = str(torch.get_num_threads())
    number += f", up to {cpu_layer.num_threads()} for layers in native code" if is_native else "; layers in torch"
    threads = [("threads", number)] if model.device.type == "cpu" else []
    names: dict[Layout, Any] = {"auto": str(model.dtype).removeprefix("torch."), "fp8_key": "FP8 keys", "fp8": "FP8"}
    page = KVCache.bytes_per_page(cfg, model.dtype, cache.layout, mtp=cache.mtp)
    tiers = [f"{config.kv_offloading_size:g} GiB of host memory"] if config.kv_offloading_size else []
    tiers += [f"{config.kv_disk_size:g} GiB in {config.kv_disk_dir}"] if config.kv_disk_dir else []
    drafts = "adaptive" if config.adaptive_speculation else "fixed"
    if config.simulate_acceptance is not None:
        drafts += f"; SIMULATED acceptance of {config.simulate_acceptance:g} tokens a step, answers are worth nothing"
    return [
        ("dtype", f"{weights}{cfg.dtype} on {model.device}; low-rank norms eps {cfg.lora_norm_eps:g}"),
        *threads,
        ("context", f"{max_model_len} tokens, prompt and answer together"),
        (
            "cache",
            f"{cache.num_pages * PAGE_SIZE} tokens, {cache.num_pages} pages of {page} bytes, {names[cache.layout]}",
        ),
        ("tiers", ", ".join(tiers) or off),
        ("prefixes", on if config.enable_prefix_caching else off),
        ("batch", f"{config.max_num_seqs} requests, {config.max_num_batched_tokens} tokens a step"),
        ("prompts", str(prompt_share)),
        ("drafts", f"up to {depth} a step, {drafts}" if depth else off),
        ("steps", "launched ahead" if scheduler.launch_ahead else "one after the other"),
        ("deterministic", on if config.deterministic else off),
        ("kernels", "cpu_layer/layer.cpp" if is_native else _kernels(model, deterministic=config.deterministic)),
        ("seed", str(config.seed)),
    ]


def sizes_of(model: Glm5, cache: KVCache, num_ranks: int) -> dict[str, Any]:
    """What routers are told of the devices: fields of `EngineInfo`."""
    device = model.device
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    return {
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "num_ranks": num_ranks,
        "first_gpu": device.index,
        "weight_bytes": num_bytes,
        "cache_bytes": cache.num_pages * KVCache.bytes_per_page(model.cfg, model.dtype, cache.layout, mtp=cache.mtp),
        "cache_dtype": {"auto": str(model.dtype).removeprefix("torch.")}.get(cache.layout, cache.layout),
    }


def _kernels(model: Glm5, *, deterministic: bool) -> str:
    """What each op of this model runs (kernels/dispatch.py), or what its arguments choose from, in order."""
    kinds, moes = weight_kinds(model), [module for module in model.modules() if isinstance(module, MoE)]
    ops = [*_OPS]
    ops += ["prompt_attention"] if model.device.type == "cuda" else []
    ops += ["fp8_linear"] if "FP8" in kinds else []
    ops += ["quantized_linear"] if {*kinds} - {"FP8"} else []
    named: dict[str, str] = {}
    for moe in moes[:1]:
        experts = "quantized_experts" if isinstance(moe.experts, QuantizedExperts) else "grouped_experts"
        ops += ["router", experts]
        named = {"router": moe.gate.impl, experts: moe.experts.impl}
    if deterministic:
        impl = impl_on(model.device, model.dtype)
        named |= {"select_keys": impl, "sparse_mla": impl}
    alike: dict[str, list[str]] = {}
    unlike: list[str] = []
    for op in ops:
        table, impl = TABLES[op], named.get(op, "auto")
        names = table.candidates(model.device, model.dtype, gradient=False) if impl == "auto" else [impl]
        if len(names) == 1:
            alike.setdefault(names[0], []).append(op)
        else:
            which = [f"{name} ({table.impls[name].reason})" for name in names[:-1]]
            unlike.append(f"{op} {', '.join(which)}, else {names[-1]}")
    return "; ".join([*(f"{', '.join(of)} {name}" for name, of in alike.items()), *unlike])
