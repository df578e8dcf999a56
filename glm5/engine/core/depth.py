"""How many tokens to draft, from acceptance rates and the number of decoding sequences; and what a step costs.

    tokens a step   = B (1 + r_1 + ... + r_k)          r_j: rate at which drafts 1 to j are all accepted
    time of a step  = L t + bytes(n) / bandwidth + n flops / rate + k (d + B flops_draft / rate),   n = B (1 + k) rows
    bytes(n)        = dense + experts (1 - (1 - A/E)^n)                                  weights that some row needs

With tensor parallelism each rank reads and computes its shard; a layer has two all-reduces.

Rows are nearly free until computing takes longer than reading weights and launching kernels: k falls with the load,
and to 0 where drafts are rejected. The depth with the most tokens a second is chosen, if it beats the current one by a
margin. Depths that are not drafted are not measured, so a few probing steps now and then draft to the maximum.

Nothing here reads a clock: the same steps give the same depths. Tokens never depend on the depth.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from glm5.config.model import ModelConfig
from glm5.config.tensors import count_parameters

MARGIN = 0.03  # relative gain in tokens a second, so that noise in the counts does not change the depth
WINDOW = 256.0  # drafts at a position after which earlier ones count for 1/e
PRIOR, PRIOR_DRAFTS = 0.7, 10.0  # acceptance before any is measured, and the number of drafts that the prior counts for
PROBE_EVERY, PROBE_STEPS = 1000, 8  # steps; counts at a position without drafts also fade to 1/e in PROBE_EVERY steps
RECONSIDER_EVERY = 8  # steps


@dataclass(frozen=True)
class Machine:
    """Minimum seconds of a layer and of a draft (a layer and the head); bytes of weights read a second; floating-point
    operations a second; seconds of an all-reduce.

    Orders of magnitude suffice: a depth that is off by one costs a few percent.
    """

    layer_s: float
    draft_s: float
    bytes_per_s: float
    flops_per_s: float
    sum_s: float = 0.0


# CPU: one core of an AMD EPYC (Zen 4) with the demo model. A layer is a hundred small operations, unless it is native
# code (engine/runner/native.py): then most of a step is outside its layers.
MACHINES = {
    "cpu": Machine(5e-4, 1.3e-3, 1e10, 2e10),
    "native": Machine(1.2e-4, 3e-4, 5e10, 2.5e10),
    # CUDA graphs: on an H200, a layer of GLM-5 on one rank of eight takes 70 us for one row, 20 of them for weights.
    "cuda": Machine(5e-5, 2e-4, 3.5e12, 3e14, sum_s=6e-6),
}


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step by the formula above."""

    machine: Machine
    num_layers: int
    dense_bytes: float
    expert_bytes: float
    active_share: float
    row_flops: float
    draft_flops: float
    num_ranks: int = 1

    @classmethod
    def of(cls, cfg: ModelConfig, weight_bytes: float, machine: str, num_ranks: int = 1) -> "StepCost":
        """`weight_bytes`: of one weight. `machine`: a key of MACHINES; any other counts as a CPU."""
        count = count_parameters(cfg)
        experts = count.by_part.get("experts", 0)
        return cls(
            machine=MACHINES.get(machine, MACHINES["cpu"]),
            num_layers=cfg.num_hidden_layers,
            dense_bytes=(count.total - experts) * weight_bytes,
            expert_bytes=experts * weight_bytes,
            active_share=cfg.num_experts_per_tok / cfg.n_routed_experts,
            row_flops=2.0 * count.active,
            # One layer, and the head once more.
            draft_flops=2.0 * (count.active / cfg.num_hidden_layers + cfg.vocab_size * cfg.hidden_size),
            num_ranks=num_ranks,
        )

    def seconds(self, num_seqs: int, depth: int) -> float:
        drafts = self.machine.draft_s + self._sums_s + num_seqs * self.draft_flops / self._rate
        return self.seconds_of_rows(num_seqs * (1 + depth)) + depth * drafts

    def seconds_of_rows(self, num_rows: int) -> float:
        """Seconds of a step of `num_rows` rows, of decoding sequences or prompts, without drafting."""
        num_bytes = self.dense_bytes + self.expert_bytes * (1 - (1 - self.active_share) ** num_rows)
        layers = self.num_layers * (self.machine.layer_s + self._sums_s)
        return layers + num_bytes / (self.num_ranks * self.machine.bytes_per_s) + num_rows * self.row_flops / self._rate

    def rows_within(self, seconds: float, limit: int) -> int:
        """The most rows, 1 to `limit`, of a step that takes at most `seconds`; 1 if none does."""
        return max(1, bisect_right(range(1, limit + 1), seconds, key=self.seconds_of_rows))

    @property
    def _sums_s(self) -> float:
        return 2 * self.machine.sum_s if self.num_ranks > 1 else 0.0

    @property
    def _rate(self) -> float:
        return self.num_ranks * self.machine.flops_per_s


class AdaptiveDepth:
    """Chooses the draft depth. Call `observe` with each step's drafted and accepted counts, `choose` before a step."""

    def __init__(self, max_depth: int, cost: StepCost):
        self.max_depth, self.cost, self.depth = max_depth, cost, max_depth
        self._drafted, self._accepted = [0.0] * max_depth, [0.0] * max_depth
        self._num_steps = self._decided_for = 0

    def observe(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Add a step's counts by position. Old counts fade, also where nothing is drafted, so probes weigh more."""
        for position, (drafted, accepted) in enumerate(zip(num_drafted, num_accepted, strict=True)):
            kept = max(0.0, 1 - drafted / WINDOW) if drafted else 1 - 1 / PROBE_EVERY
            self._drafted[position] = self._drafted[position] * kept + drafted
            self._accepted[position] = self._accepted[position] * kept + accepted

    def choose(self, num_seqs: int) -> int:
        """The depth of the next step, with `num_seqs` sequences decoding."""
        self._num_steps += 1
        phase = self._num_steps % PROBE_EVERY
        if phase < PROBE_STEPS <= self._num_steps:
            return self.max_depth
        is_other_load = not self._decided_for / 2 < num_seqs < 2 * self._decided_for
        if num_seqs and (is_other_load or phase % RECONSIDER_EVERY == 0):
            self._decided_for = num_seqs
            rates = self._rates(num_seqs)
            best = max(range(len(rates)), key=rates.__getitem__)
            if rates[best] > rates[self.depth] * (1 + MARGIN) or is_other_load:
                self.depth = best
        return self.depth

    def _rates(self, num_seqs: int) -> list[float]:
        """Tokens a second for each depth."""
        num_tokens, rates = 1.0, [num_seqs / self.cost.seconds(num_seqs, 0)]
        share, conditional = 1.0, PRIOR
        for position in range(self.max_depth):
            # The prior of a draft is the conditional acceptance rate of the draft before it.
            expected = PRIOR_DRAFTS * share * conditional
            found = (self._accepted[position] + expected) / (self._drafted[position] + PRIOR_DRAFTS)
            conditional = min(found / share, 1.0) if share else 0.0
            share *= conditional
            num_tokens += share
            rates.append(num_seqs * num_tokens / self.cost.seconds(num_seqs, position + 1))
        return rates
