"""Kinds of attention on one retrieval task: `glm5 bench transition`, linear attention from the same dense weights, and
selections that layers share without training."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from glm5.bench.claims.linear_attention import LinearAttention
from glm5.bench.claims.trainings import trained
from glm5.bench.transition.run import DSA, Measure, transitions
from glm5.bench.transition.trainings import Transition
from glm5.checkpoint.load import load
from glm5.config.model import ModelConfig
from glm5.config.step import OptimizerConfig
from glm5.config.train import Recipe, StageConfig, read_recipe
from glm5.config.transition import TransitionConfig
from glm5.model.block import DecoderLayer
from glm5.train.build import Builder
from glm5.train.loop import execution_settings
from glm5.train.optim.build import Optimizers
from glm5.train.stage_trainer import StageTrainer
from glm5.train.step import Phase

LINEAR = {"SimpleGDN, adapted": False, "Gated DeltaNet, adapted": True}
OWN = ".self_attn.own."
SHARED = ("full", "shared")
"""Of every two layers the second takes the selection of the first."""


def attention(recipe: str | None, settings: tuple[str, ...], seed: int, folder: Path) -> dict[str, float]:
    """Accuracy in percent by kind of attention, and " recall" for the share of attention on the selected keys."""
    assert recipe is not None, "the registry names one"
    out = {"recipe": recipe, "set": settings, "out": str(folder), "seeds": (seed,), "processes": 1}
    found: dict[str, float] = {}
    for row in (row for one in transitions(TransitionConfig(**out)) for row in one.rows):
        found[row.name] = 100 * row.accuracy
        if row.recall is not None:
            found[f"{row.name} recall"] = 100 * row.recall
    return found | of_checkpoints(Transition(read_recipe(recipe, settings), seed, folder), Path(recipe).parent)


def of_checkpoints(transition: Transition, beside: Path) -> dict[str, float]:
    """Of the weights that a transition has left: linear attention in half of the layers, as windows alternate there,
    and selections that are shared."""
    dsa = transition.dsa()
    measure = Measure(transition, beside, 128)
    with execution_settings(dsa):
        model = load(dsa.folder / dsa.stage[-1].name / "last")
        half = len(model.cfg.indexer_types) // len(SHARED)
        model.cfg = model.cfg.replace(indexer_types=list(SHARED * half))
        found = {f"{DSA}, shared": 100 * measure.row("", model, Phase("sparse")).accuracy}
        for name, gated in LINEAR.items():
            recipe = transition.control(name, None)
            recipe.folder.mkdir(parents=True, exist_ok=True)
            builder = Builder(recipe, beside, recipe.folder)
            trainer = _LinearTrainer(recipe, builder, gated=gated)
            trained(recipe, builder, trainer)
            found[name] = 100 * measure.row("", trainer.model, Phase()).accuracy
    return found


class _LinearTrainer(StageTrainer):
    """Every second layer, from the first on, has linear attention."""

    def __init__(self, recipe: Recipe, builder: Builder, *, gated: bool) -> None:
        super().__init__(recipe, builder, None)
        torch.manual_seed(recipe.seed)
        for layer in self.model.model.layers[::2]:
            assert isinstance(layer, DecoderLayer)
            layer.self_attn = LinearAttention(layer.self_attn, gated=gated)

    def _optimizers(
        self, named: Mapping[str, nn.Parameter], cfg: ModelConfig, stage: StageConfig, before: Optimizers | None
    ) -> Optimizers:
        if not any(OWN in name for name in named):
            return super()._optimizers(named, cfg, stage, before)
        return _WithGates(named, cfg, self.recipe.optimizer)


class _WithGates(Optimizers):
    """AdamW for the parameters of `Gates`, of which the table of optimizers has no rule."""

    def __init__(self, named: Mapping[str, nn.Parameter], model: ModelConfig, cfg: OptimizerConfig) -> None:
        own = {name: weight for name, weight in named.items() if OWN in name}
        super().__init__({name: weight for name, weight in named.items() if name not in own}, model, cfg)
        self.gates = torch.optim.AdamW(own.values(), betas=cfg.betas, eps=cfg.eps, weight_decay=0.0)
        self.gates.param_groups[0]["lr_scale"] = 1.0
        self.named |= own

    @property
    def each(self) -> tuple[torch.optim.Optimizer, ...]:
        return (*super().each, self.gates)
