"""Moves activation outliers into weights: activations are divided by a scale per channel, weights are multiplied.

    X' = X / s    W' = W diag(s)    X' W'^T = X W^T          s_i = a_i^alpha / w_i^beta
    E(s) = |Q(X') Q(W')^T - X W^T| / |X W^T|                 a, w: sizes of input i and of column i

Flex_Smooth_Quant searches alpha over 0, 0.05 .. 1 with beta = 1 - alpha, then beta with the best alpha. Flex_AWQ_SSZ
uses beta = 0 and the target's quantizer. Ties go to the larger exponent. Source: msModelSlim
`processor/anti_outlier/flex_smooth/`. `upstream=True` reproduces it with its flaws:

- Flex_Smooth_Quant always scores with 8 bits, and always smooths, even if that increases the error;
- Flex_AWQ_SSZ scores a = max|X| but returns mean|X|, and quantizes activations by channel, not by token;
- a channel that no token uses is divided by 1e-5, which rounds its weights to zero.

Otherwise Q is the target's quantizer, the scored s is returned, a is max|X| or mean|X|, s = 1 is a candidate, unused
channels keep s = 1, and the geometric mean of s is 1. Tokens [..., T, I] of a stack of experts are padded with rows of
zeros, which do not change the result; `counts` [...] are the numbers of real tokens, for means.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.quant.chunks import elements_at_once, wide
from glm5.quant.minmax import fake_quantize
from glm5.quant.record import INT8_TOKEN, Grid, Scheme
from glm5.quant.ssz import ssz, ssz_upstream

EXPONENTS = tuple(i / 20 for i in range(21))
SEARCH_STARTS = (1.0, 0.8, 0.6, 0.45, 0.3)
"""Starts of SSZ within a search: its error is within 2 % of that with all starts."""

_MIN_SCALE = 1e-5
_MAX_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 28}  # of tokens, weights and outputs at a time; on a CPU per core


class Target(NamedTuple):
    """A weight [..., O, I] that reads the smoothed channels. Without a scheme it does not count in the error.

    For tokens [T, I] without a batch, a stack of experts counts as one matrix with the rows of all.
    """

    weight: Tensor
    scheme: Scheme | None


class Smoothing(NamedTuple):
    """Scales [..., I]; for each member of the batch its exponents, and the error E with and without smoothing. A member
    without tokens has scales 1, and zeros for the rest."""

    scale: Tensor
    alpha: Tensor
    beta: Tensor
    error: Tensor
    error_before: Tensor


RoundWeight = Callable[[Tensor, Grid], Tensor]
"""Quantizes and dequantizes a weight [..., O, I]."""


def round_ssz(weight: Tensor, grid: Grid, refine: int = 1) -> Tensor:
    """Fake quantization with SSZ scales from few starts for int grids of 4 bits and less, else with min-max scales."""
    if grid.kind != "int" or grid.bits > 4 or not grid.symmetric or grid.scope not in ("channel", "group"):
        return fake_quantize(weight, grid)
    return fake_quantize(weight, grid, ssz(weight, grid, starts=SEARCH_STARTS, refine=refine))


def round_ssz_upstream(weight: Tensor, grid: Grid, steps: int = 10) -> Tensor:
    """Fake quantization with msModelSlim's SSZ."""
    return fake_quantize(weight, grid, ssz_upstream(weight, grid, steps))


def flex_smooth(
    x: Tensor,
    targets: Sequence[Target],
    *,
    alpha: float | None = None,
    beta: float | None = None,
    shared: bool = False,
    upstream: bool = False,
    round_weight: RoundWeight | None = None,
) -> Smoothing:
    """Flex_Smooth_Quant for tokens x [..., T, I] and the weights that read them. `shared`: one scale [I] for all.

    Given exponents are not searched. Computes in float32, float64 for float64.
    """
    if round_weight is None:
        round_weight = fake_quantize if upstream else round_ssz
    if upstream:
        rows = [wide(t.weight).reshape(*x.shape[:-2], -1, x.shape[-1]) for t in targets]
        targets = [Target(torch.cat(rows, -2), Scheme(INT8_TOKEN, INT8_TOKEN))]

    def run(x: Tensor, targets: Sequence[Target], _counts: Tensor | None) -> Smoothing:
        search = _Search(x, targets, shared, round_weight, normalize=not upstream)
        inputs, columns = search.largest_inputs(), search.largest_columns()
        if not upstream:
            search.consider(torch.ones_like(inputs), 0.0, 0.0)
        for exponent in EXPONENTS if alpha is None else (alpha,):
            weight_exponent = 1 - exponent if beta is None else beta
            search.consider(inputs**exponent / columns**weight_exponent, exponent, weight_exponent)
        if alpha is None and beta is None:
            search.search_beta(inputs, columns)
        return search.result()

    return _in_batches(run, x, targets, None, shared)


def flex_awq(
    x: Tensor,
    targets: Sequence[Target],
    *,
    alpha: float | None = None,
    counts: Tensor | None = None,
    shared: bool = False,
    upstream: bool = False,
    round_weight: RoundWeight | None = None,
) -> Smoothing:
    """Flex_AWQ_SSZ for tokens x [..., T, I] and the weights that read them. `shared`: one scale [I] for all.

    A given exponent is not searched.
    """
    if round_weight is None:
        round_weight = round_ssz_upstream if upstream else round_ssz

    def run(x: Tensor, targets: Sequence[Target], counts: Tensor | None) -> Smoothing:
        search = _Search(x, targets, shared, round_weight, normalize=not upstream, by_channel=upstream)
        largest, mean = search.largest_inputs(), search.mean_inputs(counts)
        for exponent in EXPONENTS if alpha is None else (alpha,):
            search.consider(largest**exponent, exponent, 0.0)
            if exponent and not upstream:
                search.consider(mean**exponent, exponent, 0.0)
        if upstream:
            applied = (mean ** search.alpha.unsqueeze(-1)).clamp_min(_MIN_SCALE)
            search.scale = torch.where(search.used.unsqueeze(-1), applied, torch.ones_like(mean))
        return search.result()

    return _in_batches(run, x, targets, counts, shared)


def _in_batches(
    run: Callable[[Tensor, Sequence[Target], Tensor | None], Smoothing],
    x: Tensor,
    targets: Sequence[Target],
    counts: Tensor | None,
    shared: bool,
) -> Smoothing:
    """Call `run` for as many members at a time as fit in memory, or for all if they share a scale."""
    lead = x.shape[:-2]
    sizes = [x.shape[-2] * x.shape[-1], *(t.weight.shape[-2] * (t.weight.shape[-1] + x.shape[-2]) for t in targets)]
    at_once = max(1, elements_at_once(x.device, _MAX_ELEMENTS) // max(1, sum(sizes)))
    if shared or not lead or lead.numel() <= at_once:
        return run(x, targets, counts)
    flat = [t._replace(weight=t.weight.reshape(-1, *t.weight.shape[-2:])) for t in targets]
    x, counts = x.reshape(-1, *x.shape[-2:]), None if counts is None else counts.reshape(-1)
    found: list[Smoothing] = []
    for start in range(0, len(x), at_once):
        batch = slice(start, start + at_once)
        found.append(
            run(
                x[batch],
                [t._replace(weight=t.weight[batch]) for t in flat],
                counts[batch] if counts is not None else None,
            )
        )
    joined = (torch.cat(values) for values in zip(*found, strict=True))
    return Smoothing(*(value.reshape((*lead, *value.shape[1:])) for value in joined))


class _Search:
    """The best scales so far, for every member of a batch [b, T, I]. `shared`: one scale for all members."""

    def __init__(
        self,
        x: Tensor,
        targets: Iterable[Target],
        shared: bool,
        round_weight: RoundWeight,
        *,
        normalize: bool,
        by_channel: bool = False,
    ):
        self.lead, self.shared, self.round_weight = x.shape[:-2], shared, round_weight
        self.normalize, self.by_channel = normalize, by_channel
        self.x = wide(x.reshape(-1, *x.shape[-2:]))
        self.targets = [
            (wide(t.weight.reshape(len(self.x), -1, t.weight.shape[-1])), t.scheme)
            for t in targets
            if t.scheme is not None
        ]
        self.expected = [self.x @ weight.mT for weight, _ in self.targets]
        self.size = sum((expected.square().sum((-2, -1)) for expected in self.expected), self.x.new_zeros(len(self.x)))
        self.size = self._pooled(self.size)
        self.used = self.size > 0
        members, width = (1 if shared else len(self.x)), self.x.shape[-1]
        self.scale = self.x.new_ones(members, width)
        self.alpha, self.beta = self.x.new_zeros(members), self.x.new_zeros(members)
        self.error = torch.full_like(self.alpha, torch.inf)
        self.before = self._error(self.scale)
        self.reached = self.largest_inputs() > 0

    def largest_inputs(self) -> Tensor:
        largest = self.x.abs().amax(-2)
        return largest.amax(0, keepdim=True) if self.shared else largest

    def mean_inputs(self, counts: Tensor | None) -> Tensor:
        total = self.x.abs().sum(-2)
        each = total.new_full((len(total),), self.x.shape[-2]) if counts is None else counts.reshape(-1).to(total)
        if self.shared:
            total, each = total.sum(0, keepdim=True), each.sum(0, keepdim=True)
        return total / each.clamp_min(1).unsqueeze(-1)

    def largest_columns(self) -> Tensor:
        columns = torch.stack([weight.abs().amax(-2) for weight, _ in self.targets]).amax(0)
        return columns.amax(0, keepdim=True) if self.shared else columns

    def consider(self, scale: Tensor, alpha: float | Tensor, beta: float | Tensor) -> None:
        scale = self._usable(scale)
        error = self._error(scale)
        better = (error <= self.error) & self.used
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better.unsqueeze(-1), scale, self.scale)
        self.alpha = torch.where(better, torch.as_tensor(alpha, dtype=error.dtype, device=error.device), self.alpha)
        self.beta = torch.where(better, torch.as_tensor(beta, dtype=error.dtype, device=error.device), self.beta)

    def search_beta(self, input_size: Tensor, column_size: Tensor) -> None:
        """Every beta, with each member's best alpha."""
        alpha = self.alpha.clone()
        raised = input_size ** alpha.unsqueeze(-1)
        for beta in EXPONENTS:
            self.consider(raised / column_size**beta, alpha, beta)

    def result(self) -> Smoothing:
        lead = () if self.shared else self.lead
        error = torch.where(self.used, self.error, torch.zeros_like(self.error))
        values = (self.scale, self.alpha, self.beta, error, self.before)
        return Smoothing(*(value.reshape((*lead, *value.shape[1:])) for value in values))

    def _usable(self, scale: Tensor) -> Tensor:
        if not self.normalize:
            return scale.clamp_min(_MIN_SCALE)
        valid = scale.isfinite() & (scale > 0) & self.reached
        log = torch.where(valid, scale, torch.ones_like(scale)).log()
        # In float64: else the last bit of a GPU's sum depends on the number of members.
        mean = log.sum(-1, keepdim=True, dtype=torch.float64) / valid.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(valid, (log - mean.to(log.dtype)).exp(), torch.ones_like(scale))

    def _error(self, scale: Tensor) -> Tensor:
        """E of every member, for scale [b or 1, I]; 0 for members without tokens."""
        scale = scale.unsqueeze(-2)
        x, rounded = self.x / scale, dict[Grid | None, Tensor]()
        squared_error = self.x.new_zeros(len(self.x))
        for (weight, scheme), expected in zip(self.targets, self.expected, strict=True):
            assert scheme is not None
            if scheme.act not in rounded:
                rounded[scheme.act] = self._round_inputs(x, scheme.act)
            output = rounded[scheme.act] @ self.round_weight(weight * scale, scheme.weight).mT
            squared_error += (output - expected).square_().sum((-2, -1))
        error = (self._pooled(squared_error) / self.size).sqrt()
        return torch.where(self.used, error, torch.zeros_like(error))

    def _round_inputs(self, x: Tensor, grid: Grid | None) -> Tensor:
        if self.by_channel:
            return fake_quantize(x.mT.contiguous(), grid).mT
        return fake_quantize(x, grid)

    def _pooled(self, sums: Tensor) -> Tensor:
        return sums.sum(0, keepdim=True) if self.shared else sums
