"""Scheduler and runner without the rest of an engine: requests in, everything that their steps brought out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.result import Launched
from glm5.engine.runner.runner import Runner, SeqSpec
from glm5.engine.sampling import SamplingParams
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import Message, Submit
from glm5.engine.scheduler.plan import StepPlan
from glm5.engine.scheduler.scheduler import Scheduler
from glm5.engine.transport.wire import RoutedExperts, TokenLogprobs
from glm5.kernels.sampled_logprobs import kept_ids
from glm5.model.glm5 import Glm5
from glm5.model.moe import MoE
from glm5.model.packed import PackedView
from tests.support.scheduling.plans import in_order


@dataclass
class Run:
    """By sequence id; `plans` are all that had rows."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    masks: dict[int, list[set[int]]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    routed: dict[int, list[RoutedExperts]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    num_preempted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class Bench:
    """A model with a small cache. `run` answers requests; the cache stays warm between runs."""

    def __init__(
        self,
        model: Glm5,
        *,
        num_pages: int = 64,
        depth: int = 0,
        max_num_seqs: int = 8,
        max_model_len: int = 256,
        routing: bool = False,
        pass_rows: int | None = None,
        fused: bool | None = None,
        **config: object,
    ):
        cache = KVCache(model.cfg, num_pages, dtype=model.dtype, mtp=depth > 0, device=model.device)
        self.model = model
        settings = {"max_tokens_per_step": 64, "token_buckets": (8, 16, 32)} | config
        self.scheduler = Scheduler(
            SchedulerConfig(
                page_size=cache.page_size,
                num_pages=num_pages,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_depth=depth,
                **settings,  # pyright: ignore[reportArgumentType]
            )
        )
        self.runner = Runner(
            model,
            cache,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_depth=depth,
            record_routing=routing,
            pass_rows=pass_rows,
            fused=fused,
        )
        self._num_seqs = 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        routed: bool = False,
        messages: Sequence[Message] = (),
    ) -> Run:
        """Answer all prompts, n = 1 or more each; ids count up in order, from 0 in the result. Those drawn with
        top_k, top_p or min_p have sampling masks."""
        out, specs, first = Run(), dict[int, SeqSpec](), self._num_seqs
        submits: list[Message] = []
        for number, prompt in enumerate(prompts):
            given = params if isinstance(params, SamplingParams) else params[number]
            ids = tuple(range(self._num_seqs, self._num_seqs + given.n))
            self._num_seqs += given.n
            for seq_id, own in zip(ids, given.sequences(), strict=True):
                seed = own.seed if own.seed is not None else 1000 + seq_id - first
                reports = {"routed": routed, "sampling_mask": own.truncates}
                specs[seq_id] = SeqSpec(own, seed, len(prompt), tuple(own.stop_token_ids), **reports)
                out.tokens[seq_id - first] = []
            whole = given.prompt_logprobs is not None or routed
            stops = frozenset(given.stop_token_ids)
            submits.append(Submit(ids, tuple(prompt), given.max_tokens or 16, stops, computes_prompt=whole))
        self.scheduler.deliver(self.scheduler.next_step, [*submits, *messages])
        before: tuple[StepPlan, Launched] | None = None
        while self.scheduler.has_work:
            plan = self.scheduler.plan(self.scheduler.next_step)
            launched = self.runner.launch(plan, specs)
            out.num_preempted += len(plan.preempted)
            if before is not None:
                self._take(*before, out, first)
                before = None
            if plan.items:
                before = plan, launched
                if not self.scheduler.config.launch_ahead:
                    self._take(*before, out, first)
                    before = None
        return out

    def _take(self, plan: StepPlan, launched: Launched, out: Run, first: int) -> None:
        result = launched.read()
        assert not result.no_valid_token
        out.plans.append(plan)
        out.num_drafted += sum(result.num_drafted)
        out.num_accepted += sum(result.num_accepted)
        for seq_id, entries in result.prompt_logprobs.items():
            out.prompt_logprobs.setdefault(seq_id - first, []).extend(entries)
        for gained in in_order(plan, self.scheduler.apply(plan.step, result.tokens)):
            out.tokens[gained.seq_id - first] += gained.token_ids
            entries = result.logprobs.get(gained.seq_id, [])[: len(gained.token_ids)]
            out.logprobs.setdefault(gained.seq_id - first, []).extend(entries)
            masks = result.masks.get(gained.seq_id, [])[: len(gained.token_ids)]
            out.masks.setdefault(gained.seq_id - first, []).extend([{*kept_ids(mask).tolist()} for mask in masks])
        for seq_id, routed in result.routed.items():
            out.routed.setdefault(seq_id - first, []).append(routed)


def greedy(model: Glm5, prompt: Sequence[int], count: int) -> list[int]:
    """The answer by computing everything anew for each token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


@torch.inference_mode()
def logprobs_of(model: Glm5, ids: Sequence[int]) -> Tensor:
    """log softmax [T, W] in float32 after each token, in one pass over all of them."""
    hidden_TD = model(torch.tensor(ids, device=model.device), PackedView([len(ids)], model.device))
    return model.head(hidden_TD).float().log_softmax(dim=-1).cpu()


def check_logprobs(entry: TokenLogprobs, row_W: Tensor, tolerance: float) -> None:
    """Raise AssertionError unless `entry` is what the model's own log-probabilities [W] say. Tokens that are as near to
    each other as rounding may change places."""
    own, ids = row_W[entry.token_id].item(), [token_id for token_id, *_ in entry.likeliest]
    assert abs(entry.logprob - own) < tolerance
    first, last = 1 + (row_W > own + 2 * tolerance).sum(), (row_W > own - 2 * tolerance).sum()
    assert first <= entry.rank <= last
    reported = torch.tensor([logprob for _, logprob, _ in entry.likeliest])
    assert len(set(ids)) == len(ids)
    assert torch.allclose(reported, row_W[ids], rtol=0, atol=tolerance)
    assert torch.allclose(row_W[ids], row_W.topk(len(ids)).values, rtol=0, atol=2 * tolerance)


def experts_of(model: Glm5, ids: Sequence[int]) -> np.ndarray:
    """What the routers pick in one pass over all tokens: [T, MoE layers, A]."""
    received: list[Tensor] = []
    moes = [layer.mlp for layer in model.model.layers[: model.cfg.num_hidden_layers] if isinstance(layer.mlp, MoE)]
    hooks = [moe.gate.register_forward_hook(lambda _, __, out: received.append(out[1].clone())) for moe in moes]
    logprobs_of(model, ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(received, dim=1).numpy()
