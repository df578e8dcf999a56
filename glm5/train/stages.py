"""What each kind of stage trains, and how it looks at keys.

    pretrain   all but the indexers        dense attention                    next token, MTP, balance
    midtrain   the same                    the same, documents packed whole   the same
    warmup     the indexers alone          dense attention                    KL over every causal key
    sparse     all                         keys that the indexers select      next token, MTP, balance; KL over them
    sft        as sparse                   as sparse                          the same, on what the model said

Names of parameters never change, so a checkpoint of any stage can begin any other.
"""

from glm5.config.model import ModelConfig
from glm5.config.step import LossConfig
from glm5.config.train import Kind, Recipe, StageConfig
from glm5.model.glm5 import Glm5
from glm5.train.optim.build import INDEXER
from glm5.train.step import Phase


def phase_of(stage: StageConfig) -> Phase:
    """Which keys attention reads, and whether the indexers learn."""
    if stage.kind == "warmup":
        return Phase("warmup", learn_index=True)
    return Phase("dense", window=stage.window) if stage.reads_all else Phase("sparse", learn_index=True)


def choose_parameters(model: Glm5, stage: StageConfig) -> None:
    """Mark what the stage trains. What it does not train has no gradient, and no optimizer state."""
    phase = phase_of(stage)
    for name, weight in model.named_parameters():
        of_indexer = INDEXER in name
        weight.requires_grad_(phase.learn_index if of_indexer else stage.kind != "warmup")


def losses_of(recipe: Recipe, stage: StageConfig, step: int) -> LossConfig:
    """The stage's losses. Where the model stays as it is, so do its routers; late in a stage, so do they if asked."""
    losses = stage.losses or recipe.losses
    frozen = stage.kind == "warmup" or recipe.lora is not None or step >= stage.steps * stage.balance_until
    return losses.model_copy(update={"balance_step": 0.0}) if frozen else losses


def longer(recipe: Recipe, cfg: ModelConfig) -> list[str]:
    """A sentence for each stage with longer sequences than the model and the stages before know, under the same RoPE
    base: as likely a slip as a wish."""
    said, known = [], cfg.max_position_embeddings
    for stage in recipe.stage:
        if stage.seq_len > known and stage.rope_theta is None:
            said.append(
                f"stage {stage.name}: seq_len {stage.seq_len:,} is above the {known:,} that max_position_embeddings "
                f"says; its checkpoints will say {stage.seq_len:,}. If that is meant, give the stage a rope_theta, or "
                f"set model.config.max_position_embeddings to {stage.seq_len}"
            )
        known = max(known, stage.seq_len)
    return said


def packs(kind: Kind) -> bool:
    """Whether documents are packed whole by default: in all but pre-training (GLM-5 report, appendix A)."""
    return kind != "pretrain"
