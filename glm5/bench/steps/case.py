"""A runner with a model of one rank's shape, and sequences in the middle of decoding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.checkpoint.dummy import dummy
from glm5.checkpoint.formats.glm5 import Glm5Format
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache, Layout
from glm5.engine.runner.graphs.decode import Shape
from glm5.engine.runner.runner import Runner, SeqSpec
from glm5.engine.sampling import SamplingParams
from glm5.engine.scheduler.plan import Bucket, Entered, Item, StepPlan
from glm5.parallel.apply import connect
from glm5.parallel.group import ALONE, Group
from glm5.quantize.plan import make_plan
from glm5.quantize.recipe import built_in

_ROWS = 1 << 16  # written to the cache at a time


def rank_config(ranks: int, layers: int, name: str = "glm-5") -> ModelConfig:
    """The config of one rank's shard of the first `layers` layers: its heads, expert slices and vocabulary."""
    cfg = preset(name, layers)
    return cfg.replace(
        num_attention_heads=cfg.num_attention_heads // ranks,
        intermediate_size=cfg.intermediate_size // ranks,
        moe_intermediate_size=cfg.moe_intermediate_size // ranks,
        vocab_size=cfg.vocab_size // ranks,
        eos_token_id=[1],
        pad_token_id=0,
    )


def with_codes(cfg: ModelConfig, recipe: str) -> ModelConfig:
    """`cfg` of a checkpoint quantized by a built-in recipe of `glm5 quantize` (w4a8-channel, w8a8)."""
    schemes = make_plan(cfg, built_in(recipe), "glm5").schemes
    return cfg.replace(quantization_config=Glm5Format().config(cfg, schemes))


@dataclass(frozen=True)
class Load:
    """Decoding of `batch` sequences of `context` tokens, with `depth` drafts per step."""

    batch: int
    context: int
    depth: int = 0


@dataclass(frozen=True)
class Prompts:
    """A prefill step of `batch` prompts, tokens `start` to `context` of each, which samples one token."""

    batch: int
    context: int
    start: int = 0
    depth: int = 0

    @property
    def num_tokens(self) -> int:
        return self.batch * (self.context - self.start)


class StepCase:
    """A model with random weights and a cache for the largest of `loads`, filled with random keys. `group`: the ranks
    that share the model, each with its own case."""

    def __init__(
        self,
        cfg: ModelConfig,
        loads: Sequence[Load | Prompts],
        *,
        fp8: bool,
        layout: Layout = "auto",
        device: str = "cuda",
        group: Group = ALONE,
    ):
        self.depth = max(load.depth for load in loads)
        model = dummy(cfg, fp8=fp8, device=device, shard=group.shard)
        connect(model, group)
        room = 4 * (1 + self.depth) + PAGE_SIZE
        self.max_len = max(load.context for load in loads) + room
        num_pages = max(load.batch * -(-(load.context + room) // PAGE_SIZE) for load in loads)
        cache = KVCache(cfg, num_pages, dtype=model.dtype, device=device, layout=layout, mtp=self.depth > 0)
        self.runner = Runner(
            model,
            cache,
            max_num_seqs=max(load.batch for load in loads),
            max_model_len=self.max_len,
            max_depth=self.depth,
            fused=True,
            group=group,
        )
        self._fill(cache)

    @torch.inference_mode()
    def enter(self, load: Load | Prompts) -> tuple[StepPlan, dict[int, SeqSpec]]:
        """Enter sequences with random last tokens, or random prompts, into slots; returns the plan of their steps."""
        runner, B = self.runner, load.batch
        pages = -(-(load.context + 4 * (1 + self.depth)) // PAGE_SIZE)
        order = torch.randperm(runner.cache.num_pages, generator=torch.Generator().manual_seed(B)).tolist()
        specs = {i: SeqSpec(SamplingParams(temperature=0, ignore_eos=True), i, 1) for i in range(B)}
        entered = [Entered(i, i, [2 + i], tuple(order[i * pages : (i + 1) * pages]), 0, 0, None) for i in range(B)]
        runner.launch(StepPlan(0, 0, entered=entered), specs)
        slots, cfg = runner.slots, runner.model.cfg
        slots.len_Y[:B] = load.context
        gen = torch.Generator().manual_seed(load.context)
        if isinstance(load, Prompts):
            tokens = torch.randint(2, cfg.vocab_size, (B, load.context), generator=gen)
            slots.token_YS[:B, : load.context] = tokens.to(slots.device)
            count = load.context - load.start
            items = [Item(i, i, load.start, count, 0, "prefill", samples=True) for i in range(B)]
            bucket = Bucket(B, 0, load.num_tokens, decodes_only=False)
            return StepPlan(1, 0, items=items, num_tokens=load.num_tokens, max_end=load.context, bucket=bucket), specs
        slots.token_YS[:B, load.context - 1] = torch.randint(2, cfg.vocab_size, (B,), generator=gen).to(slots.device)
        rows = 1 + load.depth
        items = [Item(i, i, -1, rows, load.depth, "decode", samples=True) for i in range(B)]
        plan = StepPlan(1, 0, items=items, num_tokens=B * rows, depth=load.depth, draft_depth=load.depth)
        plan.max_end = load.context - 1 + rows
        plan.bucket = Bucket(B, load.depth, B * rows, decodes_only=True)
        return plan, specs

    @torch.inference_mode()
    def step(self, plan: StepPlan, specs: dict[int, SeqSpec], load: Load | Prompts) -> None:
        """Enqueue one step, then reset the sequences' lengths."""
        self.runner.launch(plan, specs)
        self.runner.slots.len_Y[: load.batch] = load.context

    @torch.inference_mode()
    def hidden(self, plan: StepPlan, load: Prompts) -> Tensor:
        """Hidden states [T, D] of a step of prompts."""
        assert self.runner.prompts is not None
        return self.runner.prompts.run(self.runner.pack(plan), load.context).rows.hidden_TD.clone()

    @torch.inference_mode()
    def experts(self, load: Load) -> list[float]:
        """Distinct experts of each MoE layer in a step of `load`."""
        runner = self.runner
        assert runner.steps is not None
        assert runner.passes.fused is not None
        plan, _ = self.enter(load)
        recorded = runner.passes.fused.record_routing()
        buffers = runner.steps.buffers(Shape(load.batch, load.depth))
        buffers.load(runner.pack(plan))
        runner.steps.run_eagerly(buffers, load.context + 1 + load.depth)
        counts = [float(len(torch.cat(layer).unique())) for layer in recorded]
        runner.passes.fused.stop_recording()
        return counts

    def _fill(self, cache: KVCache) -> None:
        cfg, gen = cache.cfg, torch.Generator(cache.device).manual_seed(0)
        num_layers = cfg.num_layers_with_mtp if cache.mtp else cfg.num_hidden_layers
        width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
        every = torch.arange(cache.num_pages * PAGE_SIZE, device=cache.device)
        with torch.inference_mode():
            for layer_idx in range(num_layers):
                for slot_T in every.split(_ROWS):
                    rows = torch.randn(len(slot_T), width, device=cache.device, generator=gen, dtype=cache.dtype)
                    cache.append_latent(layer_idx, slot_T, rows)
                    if cfg.has_indexer(layer_idx):
                        cache.append_index_key(layer_idx, slot_T, rows[:, : cfg.index_head_dim].contiguous())
