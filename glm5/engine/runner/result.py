"""The results of a step, read back from the device: tokens, the next drafts, log-probabilities, experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from glm5.engine.runner.inputs.batch import Ints
from glm5.engine.sampling.logprobs import Logprobs
from glm5.engine.scheduler.plan import Item
from glm5.engine.transport.wire import RoutedExperts, TokenLogprobs
from glm5.kernels.sampled_logprobs import recorded


@dataclass
class StepResult:
    """Results by sequence id. `tokens`: for `Scheduler.apply`. `drafts`: of the next step, for sequences with a
    grammar; others may be missing.

    `logprobs` and `masks` (`wire.Update.sampling_mask`): one entry a token, if requested; `prompt_logprobs`: of the
    prompt token after each row of the chunk.
    `no_valid_token`: sequences whose tokens were all masked. `num_drafted` and `num_accepted` count by draft position.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    masks: dict[int, list[bytes]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    routed: dict[int, RoutedExperts] = field(default_factory=dict)
    no_valid_token: set[int] = field(default_factory=set)
    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the tokens that follow the rows of a chunk, and of `num_logprobs` tokens for each row."""

    token_S: Tensor
    found: Logprobs
    num_logprobs: int


@dataclass
class Pending:
    """Tensors of a launched step from which its result is made. `sampling`: items that sample. `shown`: by sequence id,
    how many likeliest tokens to report; `masked`: ids with sampling masks. `unpack` splits `packed` into tokens_B,
    count_B, drafts_B and no_valid_token_T, as one copy brings them to the host. `drafts_B`: None if drafts are not
    needed."""

    sampling: Sequence[Item]
    sample_index_B: Ints
    max_depth: int
    tokens_B: Tensor
    count_B: Tensor
    no_valid_token_T: Tensor
    drafts_B: Tensor | None = None
    logprobs: Logprobs | None = None
    shown: dict[int, int] = field(default_factory=dict)
    mask_TU: Tensor | None = None
    masked: frozenset[int] = frozenset()
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    packed: Tensor | None = None
    unpack: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
    position_T: Tensor | None = None
    expert_ids_T: Tensor | None = None
    routed: list[tuple[Item, int]] = field(default_factory=list)


class Launched:
    """A launched step. Its tensors are copied to the host asynchronously; `read` waits for them."""

    def __init__(self, pending: Pending | None):
        self._pending, self._arrived = pending, None
        if pending is None:
            return
        is_here = pending.tokens_B.is_cpu
        if pending.packed is not None and pending.unpack is not None:
            # A copy, since the next step overwrites this tensor.
            packed = pending.packed.clone() if is_here else _to_host(pending.packed)
            pending.tokens_B, pending.count_B, pending.drafts_B, pending.no_valid_token_T = pending.unpack(packed)
            pending.packed = None
        if not is_here:
            _each_tensor(pending, _to_host)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def add_drafts(self, drafts_B: Tensor) -> None:
        """Add drafts made after the tokens were sampled; `read` waits for them too."""
        assert self._pending is not None
        self._pending.drafts_B = _to_host(drafts_B)
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> StepResult:
        """The step's result; empty for a plan without items."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return StepResult() if self._pending is None else _result(self._pending)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)


def _each_tensor(owner: Any, change: Any) -> None:
    """Replace every tensor in the dataclass `owner`, recursively."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, Tensor):
            object.__setattr__(owner, name, change(value))
        elif isinstance(value, Logprobs):
            _each_tensor(value, change)
        elif name == "prompt_logprobs":
            for one in value.values():
                _each_tensor(one, change)


def _result(pending: Pending) -> StepResult:
    sampling = pending.sampling
    tokens, counts = pending.tokens_B.tolist(), pending.count_B.tolist()
    seq_ids = [item.seq_id for item in sampling]
    if pending.tokens_B.shape[1] > 1:
        tokens = [ids[:count] for ids, count in zip(tokens, counts, strict=False)]
    result = StepResult(dict(zip(seq_ids, tokens, strict=False)))
    if pending.drafts_B is not None and pending.max_depth:
        result.drafts = dict(zip(seq_ids, pending.drafts_B.tolist(), strict=False))
    result.num_drafted, result.num_accepted = _count_drafts(sampling, counts, pending.max_depth)
    if bool(pending.no_valid_token_T.any()):
        for seq_id, count, place in zip(seq_ids, counts, pending.sample_index_B.tolist(), strict=False):
            if bool(pending.no_valid_token_T[place : place + count].any()):
                result.no_valid_token.add(seq_id)
    if pending.logprobs is not None and pending.shown:
        rows = _entries(pending.logprobs)
        for seq_id, place in zip(seq_ids, pending.sample_index_B.tolist(), strict=False):
            if seq_id in pending.shown:
                result.logprobs[seq_id] = rows.of(result.tokens[seq_id], place, pending.shown[seq_id])
    if pending.mask_TU is not None:
        places = zip(seq_ids, counts, pending.sample_index_B.tolist(), strict=False)
        spans = {seq_id: range(place, place + count) for seq_id, count, place in places if seq_id in pending.masked}
        masks = iter(recorded(pending.mask_TU.numpy()[[*chain(*spans.values())]]))
        result.masks = {seq_id: list(islice(masks, len(span))) for seq_id, span in spans.items()}
    for seq_id, prompt in pending.prompt_logprobs.items():
        entries = _entries(prompt.found)
        result.prompt_logprobs[seq_id] = entries.of(prompt.token_S.tolist(), 0, prompt.num_logprobs)
    if pending.expert_ids_T is not None:
        counts_of = dict(zip(seq_ids, counts, strict=False))
        for item, first in pending.routed:
            result.routed[item.seq_id] = _routed(pending, item, first, counts_of)
    return result


def _count_drafts(items: Sequence[Item], counts: Sequence[int], max_depth: int) -> tuple[list[int], list[int]]:
    """Checked drafts, and accepted ones, by draft position. `counts`: committed tokens."""
    drafted, accepted = [0] * max_depth, [0] * max_depth
    if max_depth:
        for item, count in zip(items, counts, strict=False):
            for position in range(item.depth):
                drafted[position] += 1
                accepted[position] += position < count - 1
    return drafted, accepted


@dataclass(frozen=True)
class _Entries:
    """Columns of log-probabilities as lists."""

    logprob: Sequence[float]
    tempered: Sequence[float]
    rank: Sequence[int]
    likeliest: Sequence[list[int]]
    top_logprob: Sequence[list[float]]
    top_tempered: Sequence[list[float]]

    def of(self, token_ids: list[int], first: int, num_logprobs: int) -> list[TokenLogprobs]:
        """Entries of the rows from `first` on, one a token."""
        last = first + len(token_ids)
        columns = self.logprob[first:last], self.tempered[first:last], self.rank[first:last]
        entries = list(map(TokenLogprobs, token_ids, *columns))
        for row, entry in enumerate(entries if num_logprobs else (), start=first):
            best = self.likeliest[row], self.top_logprob[row], self.top_tempered[row]
            entry.likeliest = list(zip(*(column[:num_logprobs] for column in best), strict=True))
        return entries


def _entries(found: Logprobs) -> _Entries:
    return _Entries(
        found.logprob_T.tolist(),
        found.tempered_T.tolist(),
        found.rank_T.tolist(),
        found.top_token_TU.tolist(),
        found.top_logprob_TU.tolist(),
        found.top_tempered_TU.tolist(),
    )


def _routed(pending: Pending, item: Item, first: int, counts: dict[int, int]) -> RoutedExperts:
    """Experts of an item's rows; of a decoding one, only those of accepted rows."""
    assert pending.expert_ids_T is not None and pending.position_T is not None  # noqa: PT018
    num_rows = counts[item.seq_id] if item.kind == "decode" else item.num_rows
    experts = pending.expert_ids_T[first : first + num_rows].contiguous().numpy()
    shape = (experts.shape[0], experts.shape[1], experts.shape[2])
    return RoutedExperts(int(pending.position_T[first]), shape, experts.astype("<i2").tobytes())
