"""What a reinforcement-learning step minimises: streams of tokens, each a mean with a denominator of its own.

    policy    - sum_t u_t w_t log pi(t) / sum_t u_t       w_t: the algorithm's weight (rl/algorithms/weights.py)
    ref_kl    sum_t u_t (exp(d_t) - d_t - 1) / sum_t u_t  d_t = log pi_reference(t) - log pi(t), k3: KL(pi || reference)
    teacher   sum_t u_t KL_t / sum_t u_t                  over its likeliest tokens (rl/algorithms/distillation.py)
    entropy   sum_t u_t H_t / sum_t u_t                   subtracted: a bonus
    ce        sum_t u_t CE_t / sum_t u_t                  of the model's own distribution, as in supervised training
    value     sum_t u_t (V_t - return_t)^2 / 2 / sum_t u_t

u_t is the batch's column of that name (ce: its loss weight, teacher: the policy's column). Sums run over all batches
and ranks. log pi, H and the weights are those of the distribution that tokens were sampled from: at the temperature,
over the kept vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from glm5.common.errors import TrainingError
from glm5.kernels.sampled_logprobs import Kept, sampled_logprobs
from glm5.kernels.token_logprobs import token_logprobs
from glm5.rl.algorithms.distillation import top_k_kl, with_teacher
from glm5.rl.algorithms.ratios import Ratios
from glm5.rl.algorithms.table import Preset
from glm5.train.batch import Batch, Targets
from glm5.train.objective import Losses, Pass

SAMPLED = ("policy", "ref_kl", "entropy")
"""Streams over the distribution that tokens were sampled from."""
STREAMS = (*SAMPLED, "value", "ce")


class Scorer(Protocol):
    """`kernels.sampled_logprobs`, or the same in another arithmetic."""

    def __call__(
        self,
        hidden_TD: Tensor,
        weight_WD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        kept: Kept | None,
        *,
        chunk: int,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Coefficients:
    """Factors of the streams beside the policy's."""

    ref_kl: float = 0.0
    entropy: float = 0.0
    value: float = 0.5
    ce: float = 1.0


class Scored(NamedTuple):
    """What the trainer computed of a batch's policy tokens, without gradients, [G] each. `index_G`: their places in the
    batch, in host memory."""

    index_G: Tensor
    logprob_G: Tensor
    entropy_G: Tensor
    weight_G: Tensor
    masked_G: Tensor
    advantage_G: Tensor
    teacher_kl_G: Tensor | None


class RLObjective:
    """The streams above. `on_scored`: called with each batch and what was computed of it, for records."""

    def __init__(
        self,
        preset: Preset,
        coefficients: Coefficients = Coefficients(),
        *,
        chunk: int = 4096,
        scorer: Scorer = sampled_logprobs,
        on_scored: Callable[[Batch, Scored], None] | None = None,
    ) -> None:
        self.preset, self.coefficients, self.chunk = preset, coefficients, chunk
        self.scorer, self.on_scored = scorer, on_scored

    @property
    def factors(self) -> dict[str, float]:
        of = self.coefficients
        trained = {"policy": 1.0, "ref_kl": of.ref_kl, "entropy": -of.entropy, "value": of.value, "ce": of.ce}
        return {**trained, "teacher": 1.0, "masked": 0.0, "mismatch_kl": 0.0, "ratio": 0.0}

    def totals(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Sums of the streams' weights, and the number of policy "actions"."""
        sums: dict[str, float] = dict.fromkeys((*STREAMS, "actions"), 0.0)
        for batch in batches:
            index_G = batch.targets_of((*SAMPLED, "value")).index_G
            for name in (*SAMPLED, "value"):
                if name in batch.columns:
                    sums[name] += batch.columns[name][index_G].sum(dtype=torch.float64).item()
            sums["actions"] += float((_column(batch, "policy")[index_G] != 0).sum())
            sums["ce"] += batch.weight_of_targets(1)
        return sums

    def check(self, totals: Mapping[str, float], num_batches: int) -> None:
        """One stream with something to learn is enough."""
        factors = self.factors
        if not any(totals[name] and factors[name] for name in STREAMS):
            raise TrainingError(
                f"nothing to learn from in {num_batches} batches: no token has a weight in any of "
                f"{', '.join(name for name in STREAMS if factors[name])}; look at the rollouts and their masks"
            )

    def losses(self, of: Pass) -> Losses:
        if any(of.totals[name] for name in SAMPLED):
            yield from self._sampled(of)
        if of.totals["value"]:
            yield "value", _value_loss(of)
        if of.totals["ce"]:
            position_G, target_G, weight_G = of.batch.targets(1)
            weight_WD = of.model.lm_head.weight
            logprob_G = token_logprobs(of.hidden_TD[position_G], weight_WD, target_G, chunk=self.chunk)
            yield "ce", -(logprob_G * weight_G).sum() / of.totals["ce"]

    def _sampled(self, of: Pass) -> Iterator[tuple[str, Tensor]]:
        tokens = of.batch.targets_of(SAMPLED)
        temperature_G = _of(tokens, "temperature", "policy")
        hidden_GD, weight_WD = of.hidden_TD[tokens.position_G], of.model.lm_head.weight
        logprob_G, entropy_G = self.scorer(
            hidden_GD, weight_WD, tokens.id_G, temperature_G, tokens.kept, chunk=self.chunk
        )
        dtype = logprob_G.dtype
        if not self.coefficients.entropy:
            entropy_G = entropy_G.detach()
        if of.totals["policy"]:
            for name, loss in self._policy(of, tokens, logprob_G, entropy_G):
                yield name, loss.to(dtype)
        if of.totals["ref_kl"] and "reference" in tokens.columns:
            difference_G = tokens.columns["reference"] - logprob_G
            kl_G = torch.expm1(difference_G) - difference_G
            yield "ref_kl", _mean(kl_G, tokens, "ref_kl", of).to(dtype)
        if of.totals["entropy"]:
            yield "entropy", _mean(entropy_G, tokens, "entropy", of).to(dtype)

    def _policy(self, of: Pass, tokens: Targets, logprob_G: Tensor, entropy_G: Tensor) -> Iterator[tuple[str, Tensor]]:
        chosen_G = (_column(of.batch, "policy")[tokens.index_G] != 0).nonzero()[:, 0]
        if len(chosen_G) < len(tokens.index_G):
            chosen_G = chosen_G.to(logprob_G.device)
            tokens, logprob_G, entropy_G = tokens.take(chosen_G), logprob_G[chosen_G], entropy_G[chosen_G]
        current_G, rollout_G = logprob_G.detach().double(), _of(tokens, "rollout", "policy")
        advantage_G, teacher_G = _of(tokens, "advantage", "policy"), tokens.columns.get("teacher")
        teacher_kl_G = None
        if teacher_G is not None:
            if "teacher_top" in of.batch.columns:
                kl_G = self._teacher_kl(of, tokens)
                yield "teacher", _mean(kl_G, tokens, "policy", of)
                advantage_G = advantage_G.masked_fill(~teacher_G.isnan(), 0.0)
                teacher_kl_G = kl_G.detach().masked_fill(teacher_G.isnan(), torch.nan)
            else:
                advantage_G = with_teacher(advantage_G, teacher_G, current_G)
                teacher_kl_G = current_G - teacher_G
        ratios = Ratios(
            current_G,
            tokens.columns.get("old", current_G),
            rollout_G,
            advantage_G,
            tokens.sequence_G,
            len(of.batch.lengths),
            of.total,
        )
        weight_G, masked_G = self.preset.weigh(ratios)
        if self.on_scored is not None:
            found = logprob_G.detach(), entropy_G.detach(), weight_G, masked_G, advantage_G, teacher_kl_G
            self.on_scored(of.batch, Scored(tokens.index_G, *found))
        # A masked token has no gradient, whatever its log-probability is.
        each_G = (weight_G * logprob_G).masked_fill(weight_G == 0, 0.0)
        yield "policy", -_mean(each_G, tokens, "policy", of)
        mismatch_G = current_G - rollout_G
        yield "masked", masked_G.double().sum() / of.totals["actions"]
        yield "mismatch_kl", (torch.expm1(mismatch_G) - mismatch_G).sum() / of.totals["actions"]
        yield "ratio", mismatch_G.exp().sum() / of.totals["actions"]

    def _teacher_kl(self, of: Pass, tokens: Targets) -> Tensor:
        """The divergence from a teacher's likeliest tokens, [G] in float64; 0 where there are none."""
        device = tokens.id_G.device
        id_GK, teacher_GK = (
            of.batch.columns[name][tokens.index_G].to(device) for name in ("teacher_ids", "teacher_top")
        )
        row_N, rank_N = teacher_GK.isfinite().nonzero(as_tuple=True)
        given = of.hidden_TD[tokens.position_G[row_N]], of.model.lm_head.weight, id_GK[row_N, rank_N].long()
        kept = None if tokens.kept is None else tokens.kept.take(row_N)
        logprob_N = self.scorer(*given, tokens.columns["temperature"][row_N], kept, chunk=self.chunk)[0]
        logprob_GK = torch.full_like(teacher_GK, -torch.inf).index_put((row_N, rank_N), logprob_N.double())
        return top_k_kl(logprob_GK, teacher_GK)


def _mean(value_G: Tensor, tokens: Targets, stream: str, of: Pass) -> Tensor:
    return (
        (value_G * tokens.columns[stream]).sum() / of.totals[stream] if stream in tokens.columns else value_G.sum() * 0
    )


def _value_loss(of: Pass) -> Tensor:
    if of.model.value_head is None:
        raise TrainingError(
            "the batch has values to learn, and the model has no value head: add one (glm5.model.value_head)"
        )
    tokens = of.batch.targets_of(("value",))
    value_G = of.model.value_head(of.hidden_TD[tokens.position_G])[:, 0]
    wide_G = value_G.to(torch.promote_types(value_G.dtype, torch.float32))
    error_G = wide_G - _of(tokens, "return", "value")
    return _mean(error_G.square() / 2, tokens, "value", of).to(wide_G.dtype)


def _column(batch: Batch, name: str) -> Tensor:
    return batch.columns[name] if name in batch.columns else torch.zeros(len(batch.weight_T))


def _of(tokens: Targets, name: str, stream: str) -> Tensor:
    if name not in tokens.columns:
        raise TrainingError(f"the batch has the column {stream} and lacks {name}, which its loss needs")
    return tokens.columns[name]
