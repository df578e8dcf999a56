"""Builds an `EngineCore` from a model and settings: every open setting is resolved here, and listed."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.adapters import merge
from glm5.checkpoint.dtypes import parse_dtype
from glm5.checkpoint.dummy import dummy
from glm5.checkpoint.load import load, parse_device
from glm5.checkpoint.update import identity_of
from glm5.common.background import in_background
from glm5.common.cores import usable_cores
from glm5.common.errors import ConfigError
from glm5.config.engine import EngineConfig, check_length
from glm5.config.kv_events import KvEventsConfig
from glm5.config.model import ModelConfig
from glm5.config.tensors import count_parameters
from glm5.engine.arithmetic import ONE_THREAD, arithmetic_of, runs_native
from glm5.engine.cache.capacity import free_bytes, plan_cache, planned_length, workspace_bytes
from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache, Layout
from glm5.engine.checks import check_disk, check_gpus
from glm5.engine.core.depth import AdaptiveDepth, StepCost
from glm5.engine.core.engine_core import EngineCore
from glm5.engine.core.pace import PromptPace, PromptShare
from glm5.engine.defaults import read_defaults
from glm5.engine.distributed.follower import Follower
from glm5.engine.distributed.loaded_pages import LoadedPages
from glm5.engine.distributed.rank_wire import Begin, RankReply
from glm5.engine.distributed.ranks import RankedCache, RankedRunner, RankedWeights, Ranks
from glm5.engine.frontend.startup import WEIGHTS
from glm5.engine.runner.direct_calls import call_directly
from glm5.engine.runner.runner import Runner
from glm5.engine.runner.warm import warm_up
from glm5.engine.sampling.compiling import Compiler, Vocabulary
from glm5.engine.sampling.simulated import probability_of
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.shared_model import SharedModel
from glm5.engine.start_table import sizes_of, start_table
from glm5.engine.tiers import CopyQueue, DiskTier, HostTier, layout_of, page_io
from glm5.engine.transport.heartbeat import Heartbeat
from glm5.engine.transport.kv_events import KvEventPublisher
from glm5.engine.transport.wire import EngineInfo, Start
from glm5.engine.weights import Weights
from glm5.kernels import cpu_layer
from glm5.kernels.compile_ahead import hash_compiler
from glm5.kernels.current_device import make_current
from glm5.kernels.invariant import pass_rows
from glm5.kernels.kernel_count import start_counting
from glm5.kernels.triton_support import check_kernel_cache, installed
from glm5.model.glm5 import Glm5
from glm5.model.lowering import use_invariant, weight_bytes
from glm5.parallel.apply import connect
from glm5.parallel.group import ALONE, Group, all_reduce_min
from glm5.parallel.rendezvous import Rendezvous, open_group, store_at
from glm5.parallel.table import UNSHARDED, Shard, local_config

logger = logging.getLogger(__name__)

AUTO_DEPTH = 3
_MOST_NATIVE_THREADS = 8  # with more, each would have too few of a step's rows
_GIB = 2**30
# The least number of pages in host memory, through which pages are copied to disk.
_STAGED_PAGES = 64
_COPY_WORKERS = 2
# Timeout of collectives between ranks; the watchdog ends a hanging step earlier.
_MEET_SECONDS = 1800.0
# A mixed step computes at most a third more rows than it needs.
_TOKEN_BUCKETS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)

Progress = Callable[[str, float], None]


def build_for(start: Start, on_progress: Progress, heartbeat: Heartbeat | None = None) -> EngineCore:
    """Build the core of an engine process. `heartbeat` ends this process together with other ranks', if any. Raises
    ConfigError and CheckpointError."""
    config, path = EngineConfig(**start.config), Path(start.path)
    check_disk(config.kv_disk_dir)
    load_tokenizer = None if start.tokenizer is None else partial(Tokenizer.from_dir, start.tokenizer)
    size = config.tensor_parallel_size
    device = _device(start, 0, size)
    if size == 1:
        model = _load(start, config, UNSHARDED, device, on_progress)
        return build_core(model, config, source=path, load_tokenizer=load_tokenizer, on_progress=on_progress)
    local_config(ModelConfig.from_file(path), size)
    assert heartbeat is not None, "ranks need a process of their own"
    on_progress("waiting for the ranks", 0.0)
    rendezvous = Rendezvous()
    store = rendezvous.open(size)
    heartbeat.ranks = ranks = Ranks(start, size, rendezvous.port, heartbeat)
    group = open_group(Shard(0, size), device, store, timeout_s=_MEET_SECONDS)
    read = _Read()
    model = _load(start, config, group.shard, device, on_progress, read)
    on_progress("waiting for the ranks' weights", 0.0)
    connect(model, group)
    rate = read.by_all(group, model.device)
    parts = _parts(model, config, path, group, on_progress)
    pages = LoadedPages(parts.cache, group)
    kind = "GPUs" if device.type == "cuda" else "CPUs"
    parts.info.table.append(("ranks", f"{size}, tensor parallel, on {kind}; {rate}"))
    return parts.core(load_tokenizer, RankedRunner(parts.runner, ranks, pages), ranks)


def build_follower(begin: Begin, send_reply: Callable[[RankReply], None]) -> Follower:
    """Build the engine of a rank other than the first. Raises ConfigError and CheckpointError."""
    start, shard = begin.start, Shard(begin.rank, begin.size)
    config, device = EngineConfig(**start.config), _device(start, begin.rank, begin.size)
    group = open_group(shard, device, store_at(begin.port, begin.size), timeout_s=_MEET_SECONDS)
    read = _Read()
    model = _load(start, config, shard, device, lambda _phase, _share: None, read)
    connect(model, group)
    read.by_all(group, device)
    parts = _parts(model, config, Path(start.path), group, lambda _phase, _share: None)
    pages = LoadedPages(parts.cache, group)
    weights, cache = parts.weights, parts.cache
    return Follower(parts.runner, parts.scheduler, weights=weights, cache=cache, pages=pages, send_reply=send_reply)


def _device(start: Start, rank: int, size: int) -> torch.device:
    """The device of a rank, a process of its own; GPUs are assigned in order. On it this thread's kernels run."""
    check_gpus(start.device, size)
    name = ("cuda" if torch.cuda.is_available() else "cpu") if start.device == "auto" else start.device
    device = parse_device(f"cuda:{rank}" if name == "cuda" and size > 1 else name)
    make_current(device)
    return device


@dataclass
class _Read:
    """Bytes and seconds of a rank's reading of the weights' files."""

    num_bytes: float = 0.0
    seconds: float = 0.0

    def note(self, num_bytes: int, seconds: float) -> None:
        self.num_bytes, self.seconds = num_bytes, seconds

    def by_all(self, group: Group, device: torch.device) -> str:
        """The reading speed of all ranks together. A collective: every rank must call it."""
        own = torch.tensor([self.num_bytes, self.seconds], dtype=torch.float64, device=device)
        num_bytes_by_rank, seconds_by_rank = group.all_gather(own).unbind(dim=1)
        gigabytes, seconds = float(num_bytes_by_rank.sum()) / 1e9, float(seconds_by_rank.max())
        return f"read {gigabytes:.2f} GB in {seconds:.1f} s, {gigabytes / max(seconds, 1e-9):.2f} GB/s"


def _load(
    start: Start,
    config: EngineConfig,
    shard: Shard,
    device: torch.device,
    on_progress: Progress,
    read: _Read | None = None,
) -> Glm5:
    path = Path(start.path)
    cfg = ModelConfig.from_file(path)
    check_length(cfg, config.max_model_len)
    if config.enable_return_routed_experts and not cfg.has_experts:
        raise ConfigError(
            f"enable_return_routed_experts: got true, but none of this model's {cfg.num_hidden_layers} layers has "
            "experts; allowed: false"
        )
    if device.type == "cuda" and installed():
        check_kernel_cache()
        # While the weights are read.
        in_background(hash_compiler, "glm5-compiler")
    if device.type == "cpu":
        cores = max(1, (os.cpu_count() or 1) // shard.size)
        automatic = 1 if count_parameters(cfg).active < ONE_THREAD else cores
        torch.set_num_threads(config.num_threads or automatic)
    on_progress(WEIGHTS, 0.0)
    if config.load_format == "dummy":
        model = _dummy(start, cfg, shard, device)
    else:
        model = load(
            path,
            dtype=start.dtype,
            device=device,
            lora_norm_eps=start.lora_norm_eps,
            shard=shard,
            on_read=(read or _Read()).note,
            on_share=lambda share: on_progress(WEIGHTS, share),
        )
    if config.adapter is not None:
        logger.info("%s: merged into %d matrices", config.adapter, merge(model, config.adapter))
    on_progress(WEIGHTS, 1.0)
    return model


def _dummy(start: Start, cfg: ModelConfig, shard: Shard, device: torch.device) -> Glm5:
    """Random weights in the requested dtype, or in that of a checkpoint with this config."""
    if start.lora_norm_eps is not None:
        cfg = cfg.replace(lora_norm_eps=start.lora_norm_eps)
    is_fp8 = start.dtype == "auto" and cfg.quantization_config is not None
    dtype = parse_dtype(cfg.dtype if start.dtype == "auto" else start.dtype)
    return dummy(cfg, fp8=is_fp8, dtype=dtype, device=device, shard=shard)


def build_core(
    model: Glm5,
    config: EngineConfig,
    *,
    source: Path | None = None,
    tokenizer: Tokenizer | None = None,
    load_tokenizer: Callable[[], Tokenizer] | None = None,
    on_progress: Progress = lambda _phase, _share: None,
) -> EngineCore:
    """Build the core of a model in memory. Without `source`, the caller keeps the model and may train it
    (shared_model.py). With `source`, the folder of its weights, the engine owns it.

    Grammars need the tokenizer; the first request with a grammar loads it.
    """
    if config.tensor_parallel_size != 1:
        raise ConfigError(
            f"tensor_parallel_size: got {config.tensor_parallel_size}; allowed for a model in memory: 1 (or give its "
            "folder)"
        )
    shared = SharedModel(model) if source is None else None
    parts = _parts(model if shared is None else shared.model, config, source, ALONE, on_progress, shared)
    if tokenizer is not None:
        known = tokenizer
        load_tokenizer = lambda: known  # noqa: E731
    return parts.core(load_tokenizer)


@dataclass
class _RankParts:
    """The parts of one rank."""

    cfg: ModelConfig
    source: Path | None
    runner: Runner
    scheduler: SchedulerConfig
    info: EngineInfo
    weights: Weights
    cache: KVCache
    copies: CopyQueue | None
    depth: AdaptiveDepth | None
    pace: PromptPace | None
    kv_events: KvEventsConfig | None

    def core(
        self,
        load_tokenizer: Callable[[], Tokenizer] | None,
        followed: RankedRunner | None = None,
        ranks: Ranks | None = None,
    ) -> EngineCore:
        """The core of the first rank. `followed`: its runner when there are other ranks."""
        runner, weights, cache, events = self.runner, self.weights, self.cache, None
        if self.kv_events is not None and self.kv_events.is_on:
            events = KvEventPublisher(self.kv_events, self.scheduler.page_size)
            self.info.kv_events = events.source
            self.info.table.append(("kv events", events.source.endpoint))
        return EngineCore(
            runner if followed is None else followed,
            self.scheduler,
            self.info,
            weights=weights if ranks is None else RankedWeights(weights, ranks),
            cache=cache if ranks is None else RankedCache(cache, ranks),
            compiler=None if load_tokenizer is None else Compiler(_vocabulary(self.cfg, self.source, load_tokenizer)),
            copies=self.copies,
            depth=self.depth,
            pace=self.pace,
            ranks=followed,
            kv_events=events,
        )


def _parts(
    model: Glm5,
    config: EngineConfig,
    source: Path | None,
    group: Group,
    on_progress: Progress,
    shared: SharedModel | None = None,
) -> _RankParts:
    """Build everything except for the parts that serve clients."""
    on_progress("preparing layers and cache", 0.0)
    start_counting()
    cfg, simulated = model.cfg, config.simulate_acceptance
    depth, layout = _depth(config, cfg), _layout(config, model.dtype)
    is_native = _runs_native(config, model, layout, group)  # before the memory that it leaves is counted
    max_model_len, num_pages = _sizes(config, model, layout, group, mtp=depth > 0)
    in_passes = config.deterministic and not is_native
    if in_passes:
        use_invariant(model, local_config(cfg, group.shard.size))
    call_directly(model)
    cache = KVCache(cfg, num_pages, dtype=model.dtype, device=model.device, layout=layout, mtp=depth > 0)
    weights = Weights(model, source, group.shard, derived_from(config), shared)
    # All ranks have the same KV cache: the first one stores pages for all (loaded_pages.py).
    arithmetic = arithmetic_of(model, is_native=is_native) if is_native or config.deterministic else None
    copies = _copies(config, cache, group.shard.size, arithmetic) if group.shard.rank == 0 else None
    machine = "native" if is_native else model.device.type
    cost = StepCost.of(cfg, weight_bytes(model), machine, group.shard.size)
    prompt_share = PromptShare.of(config, model.device.type, cost)
    scheduler = _scheduler(config, model, max_model_len, num_pages, depth, prompt_share, in_passes=in_passes)
    runner = Runner(
        model,
        cache,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        max_depth=depth,
        pass_rows=pass_rows(model.device) if in_passes else None,
        record_routing=config.enable_return_routed_experts,
        group=group,
        simulate=None if simulated is None else probability_of(simulated, depth),
    )
    warmth = warm_up(runner, scheduler, group, on_progress)
    info = EngineInfo(
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_depth=depth,
        vocab_size=cfg.vocab_size,
        max_logprobs=min(config.max_logprobs, cfg.vocab_size),
        routed_experts=config.enable_return_routed_experts,
        simulated_acceptance=simulated,
        arithmetic=arithmetic if group.shard.size == 1 and layout == "auto" else None,
        **sizes_of(model, cache, group.shard.size),
        table=[
            *start_table(config, model, cache, max_model_len, depth, prompt_share, scheduler, is_native=is_native),
            *([("graphs", str(warmth))] if warmth is not None else []),
        ],
    )
    return _RankParts(
        cfg=cfg,
        source=source,
        runner=runner,
        scheduler=scheduler,
        info=info,
        weights=weights,
        cache=cache,
        copies=copies,
        depth=AdaptiveDepth(depth, cost) if depth and config.adaptive_speculation else None,
        pace=prompt_share.pace,
        kv_events=config.kv_events_config,
    )


def _scheduler(
    config: EngineConfig,
    model: Glm5,
    max_model_len: int,
    num_pages: int,
    depth: int,
    prompt_share: PromptShare,
    *,
    in_passes: bool,
) -> SchedulerConfig:
    return SchedulerConfig(
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_num_seqs=config.max_num_seqs,
        max_tokens_per_step=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_depth=depth,
        launch_ahead=_launches_ahead(config, model),
        prefix_cache=config.enable_prefix_caching,
        max_prompt_chunk=config.long_prefill_token_threshold or None,
        max_prompt_tokens=prompt_share.max_tokens,
        # Prompt graphs have faster attention for these (runner.py: on a GPU, unless in passes).
        full_prompt=0 if in_passes or model.device.type == "cpu" else model.cfg.index_topk,
        tiers=_has_tiers(config),
        token_buckets=tuple(count for count in _TOKEN_BUCKETS if count < config.max_num_batched_tokens),
    )


def _depth(config: EngineConfig, cfg: ModelConfig) -> int:
    wanted = config.num_speculative_tokens
    if wanted is None:
        return AUTO_DEPTH if cfg.num_nextn_predict_layers else 0
    if wanted and not cfg.num_nextn_predict_layers:
        raise ConfigError(
            f"num_speculative_tokens: got {wanted}, but this model has no MTP layer to draft with; allowed: 0"
        )
    return wanted


def _layout(config: EngineConfig, dtype: torch.dtype) -> Layout:
    if config.kv_cache_dtype != "bfloat16":
        return config.kv_cache_dtype
    if dtype != torch.bfloat16:
        raise ConfigError(f"kv_cache_dtype: got bfloat16, but the model computes in {dtype}; allowed here: auto")
    return "auto"


def _sizes(config: EngineConfig, model: Glm5, layout: Layout, group: Group, *, mtp: bool) -> tuple[int, int]:
    """(max_model_len, number of pages), the same for all ranks."""
    cfg = model.cfg
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens: got {config.max_num_batched_tokens}; allowed: at least max_num_seqs "
            f"({config.max_num_seqs}), so that every request can take part in every step"
        )
    if (num_pages := config.num_gpu_blocks_override) is not None:
        return planned_length(cfg, config.max_model_len, num_pages), num_pages
    memory = config.kv_cache_memory_bytes or free_bytes(model.device, config.gpu_memory_utilization)
    if model.device.type == "cuda" and config.kv_cache_memory_bytes is None:
        counts = {
            "num_tokens": config.max_num_batched_tokens,
            "num_seqs": config.max_num_seqs,
            "ranks": group.shard.size,
        }
        memory -= workspace_bytes(cfg, model.dtype, depth=_depth(config, cfg), **counts)
    if group.shard.size > 1:
        (memory,) = all_reduce_min(group, [memory], model.device)
        if model.device.type == "cpu" and config.kv_cache_memory_bytes is None:  # memory that all ranks share
            memory //= group.shard.size
    return plan_cache(
        cfg,
        model.dtype,
        layout,
        mtp=mtp,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        memory=memory,
    )


def _has_tiers(config: EngineConfig) -> bool:
    return bool(config.kv_offloading_size) or config.kv_disk_dir is not None


def derived_from(config: EngineConfig) -> bytes:
    """What the weights depend on in addition to the checkpoint, as a part of their identity."""
    if config.load_format == "dummy":
        return b"dummy"
    return b"" if config.adapter is None else identity_of(Path(config.adapter))


def _copies(config: EngineConfig, cache: KVCache, num_ranks: int, arithmetic: str | None) -> CopyQueue | None:
    """The lower tiers, if configured."""
    if not _has_tiers(config):
        return None
    info = {
        "model": cache.cfg.to_dict(),
        "deterministic": config.deterministic,
        "device": cache.device.type,
        "torch": torch.__version__,
        "layout": cache.layout,
    }
    if config.deterministic:
        info["ranks"] = num_ranks
        info["arithmetic"] = str(arithmetic)
    parts = cache.parts()
    layout = layout_of(parts, info)
    num_bytes = max(int(config.kv_offloading_size * _GIB), _STAGED_PAGES * layout.num_bytes)
    host = HostTier(num_bytes, layout, pin=cache.device.type == "cuda")
    disk = None
    if config.kv_disk_dir is not None:
        disk = DiskTier(config.kv_disk_dir, int(config.kv_disk_size * _GIB), layout)
    return CopyQueue(page_io(parts), host, disk, num_workers=_COPY_WORKERS)


def _vocabulary(cfg: ModelConfig, source: Path | None, load_tokenizer: Callable[[], Tokenizer]) -> Vocabulary:
    """The bytes of each token; the tokenizer is loaded on first use."""
    loaded: list[Tokenizer] = []

    def tokenizer() -> Tokenizer:
        if not loaded:
            loaded.append(load_tokenizer())
        return loaded[0]

    eos_ids = read_defaults("auto", source).eos_ids if source is not None else None
    return Vocabulary(
        cfg.vocab_size,
        eos_ids or cfg.eos_token_id,
        lambda token_id: tokenizer().bytes_unless_special(token_id),
        lambda token_id: tokenizer().is_markup(token_id),
    )


def _runs_native(config: EngineConfig, model: Glm5, layout: Layout, group: Group) -> bool:
    """Whether native layers are used."""
    if not (group.shard.size == 1 and layout == "auto" and runs_native(model)):
        return False
    cpu_layer.set_threads(config.num_threads or min(_MOST_NATIVE_THREADS, usable_cores()))
    return True


def _launches_ahead(config: EngineConfig, model: Glm5) -> bool:
    return model.device.type != "cpu" if config.async_scheduling is None else config.async_scheduling
