"""What each kind of stage trains, the attention it uses, and its losses.

    pretrain   all but the indexers        dense attention                    next token, MTP, balance
    midtrain   the same                    the same, documents are not cut    the same
    warmup     the indexers only           dense attention                    KL over every causal key
    sparse     all                         keys that the indexers select      next token, MTP, balance; KL over them
    sft        as sparse                   as sparse                          the same, on the assistant's tokens
    reward     all but lm_head, MTP; and   as sparse                          Bradley-Terry of pairs, balance, KL
               the value head
    dpo        all but MTP                 as sparse                          DPO of pairs, balance, KL

Names of parameters do not change, so any stage can start from a checkpoint of any other.
"""

from glm5.config.model import ModelConfig
from glm5.config.step import LossConfig
from glm5.config.train import Kind, Recipe, StageConfig
from glm5.model.glm5 import Glm5
from glm5.train.optim.build import INDEXER
from glm5.train.step import Phase


def phase_of(stage: StageConfig) -> Phase:
    """The attention of a stage, and whether its indexers are trained."""
    if stage.kind == "warmup":
        return Phase("warmup", learn_index=True)
    return Phase("dense", window=stage.window) if stage.reads_all else Phase("sparse", learn_index=True)


def choose_parameters(model: Glm5, stage: StageConfig) -> None:
    """Set `requires_grad` of all parameters for the stage. Others have no gradient and no optimizer state."""
    phase = phase_of(stage)
    for name, weight in model.named_parameters():
        of_indexer = INDEXER in name
        learns = phase.learn_index if of_indexer else stage.kind != "warmup"
        weight.requires_grad_(learns and not _is_unused(name, model.cfg, stage))


def _is_unused(name: str, cfg: ModelConfig, stage: StageConfig) -> bool:
    """Whether the stage's loss does not depend on a parameter."""
    if name.startswith("value_head."):
        return stage.kind != "reward"
    if stage.kind == "reward" and name.startswith("lm_head."):
        return True
    return stage.learns_pairs and name.startswith(f"model.layers.{cfg.num_hidden_layers}.")


def losses_of(recipe: Recipe, stage: StageConfig, step: int) -> LossConfig:
    """The stage's losses at a step. Selection biases are frozen in warm-up, with LoRA, and after `balance_until`."""
    losses = stage.losses or recipe.losses
    if stage.learns_pairs:
        losses = losses.model_copy(update={"mtp_depth": 0})
    frozen = stage.kind == "warmup" or recipe.lora is not None or step >= stage.steps * stage.balance_until
    return losses.model_copy(update={"balance_step": 0.0}) if frozen else losses


def long_sequence_warnings(recipe: Recipe, cfg: ModelConfig) -> list[str]:
    """A warning for each stage with sequences longer than the model's and earlier stages', under the same RoPE base."""
    warnings, max_len = [], cfg.max_position_embeddings
    for stage in recipe.stage:
        if stage.seq_len > max_len and stage.rope_theta is None:
            warnings.append(
                f"stage {stage.name}: seq_len {stage.seq_len:,} is above the {max_len:,} that max_position_embeddings "
                f"says; its checkpoints will say {stage.seq_len:,}. If that is meant, give the stage a rope_theta, or "
                f"set model.config.max_position_embeddings to {stage.seq_len}"
            )
        max_len = max(max_len, stage.seq_len)
    return warnings


def packs_documents(kind: Kind) -> bool:
    """Whether documents are packed without cutting by default: not in pre-training (GLM-5 report, appendix A)."""
    return kind != "pretrain"
