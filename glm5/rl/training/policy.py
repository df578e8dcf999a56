"""A training step of the policy, and log-probabilities of its tokens before it.

    step = policy_step(model, RLObjective(preset_of("grpo")), OptimizerConfig(kind="adamw"))
    batches = [with_logprobs(step, batch, "old") for batch in batches]       where several steps use the same batches
    step.run(batches, lr)

Indexers do not learn (GLM-5 report, section 3.2), nor does the MTP layer, of which no stream has a loss.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from glm5.config.step import LossConfig, OptimizerConfig
from glm5.kernels.sampled_logprobs import sampled_logprobs
from glm5.model.glm5 import Glm5
from glm5.rl.training.objective import SAMPLED, RLObjective, Scorer
from glm5.train.batch import Batch
from glm5.train.master_weights import MasterWeights
from glm5.train.optim.build import INDEXER, Optimizers
from glm5.train.step import Phase, Step

SPARSE = Phase("sparse")


def choose_parameters(model: Glm5) -> None:
    """Set `requires_grad`: all learn but the indexers and the MTP layer."""
    mtp = f"model.layers.{model.cfg.num_hidden_layers}."
    for name, weight in model.named_parameters():
        weight.requires_grad_(INDEXER not in name and not name.startswith(mtp))


def policy_step(
    model: Glm5,
    objective: RLObjective,
    optimizer: OptimizerConfig,
    masters: MasterWeights | None = None,
    *,
    balance_step: float = 0.0,
    balance_weight: float = 0.0,
    choose: Callable[[Glm5], None] = choose_parameters,
) -> Step:
    """A step of a model on one device. `masters`: made after `choose`, where passes are in fewer bits.

    `balance_step`, `balance_weight`: of the routers' selection bias, frozen by default, and their auxiliary loss.
    """
    choose(model)
    named = dict(model.named_parameters()) if masters is None else masters.trained()
    losses = LossConfig(mtp_depth=0, balance_step=balance_step, balance_weight=balance_weight, chunk=objective.chunk)
    return Step(model, Optimizers(named, model.cfg, optimizer), losses, SPARSE, masters, objective)


@torch.no_grad()
def with_logprobs(
    step: Step,
    batch: Batch,
    name: str,
    scorer: Scorer = sampled_logprobs,
    *,
    chunk: int = 4096,
    model: Glm5 | None = None,
) -> Batch:
    """The batch with a column `name` ("old", "reference"): log-probabilities by the step's model as it is now, or by
    another `model` on the same device; 0 of tokens that no stream reads. On ranks without the last pipeline stage all
    are 0: nothing reads them there."""
    tokens = batch.targets_of(SAMPLED)
    of = step.model if model is None else model

    def score(hidden_TD: Tensor) -> Tensor:
        columns, given = tokens.columns, hidden_TD[tokens.position_G]
        return scorer(given, of.lm_head.weight, tokens.id_G, columns["temperature"], tokens.kept, chunk=chunk)[0]

    view = step.phase.view(batch)
    logprob_G = step.on_hidden_states(batch, view, score) if model is None else score(of(batch.ids_T, view))
    column_T = torch.zeros_like(batch.columns["rollout"])
    if logprob_G is not None:
        column_T[tokens.index_G] = logprob_G.to(column_T)
    return replace(batch, columns={**batch.columns, name: column_T})
