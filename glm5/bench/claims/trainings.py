"""Trainings in memory, without checkpoints: what they end with, and small computations without a training."""

from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from glm5.bench.optimizers.head_split import gradients, halves, measured
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import ConfigError
from glm5.config.train import Recipe, read_recipe
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.model.seams import Selection
from glm5.quant.qat import fake_int4, int4
from glm5.train.batch import Batch
from glm5.train.build import Builder
from glm5.train.evaluate import held_out
from glm5.train.loop import execution_settings
from glm5.train.qat import check_widths, set_fake_int4
from glm5.train.schedule import Schedule
from glm5.train.stage_trainer import StageTrainer
from glm5.train.step import Phase

HELD_OUT, LAST = 64, 10
"""Held-out sequences, and steps whose load of experts counts."""


def trained(recipe: Recipe, builder: Builder, trainer: StageTrainer) -> list[dict[str, float]]:
    """Run the steps of a recipe's first stage; returns the metrics of each."""
    stage, rows = recipe.stage[0], builder.rows(recipe.stage[0])
    step, schedule = trainer.begin(stage, builder.cfg, None), Schedule(stage)
    found: list[dict[str, float]] = []
    for number in range(stage.steps):
        drawn = [rows.row(draw, "train") for draw in schedule.draws(number)]
        found.append(step.run(trainer.batches(stage, drawn), schedule.lr(number)))
    return found


def training(recipe: str | None, settings: tuple[str, ...], seed: int, folder: Path) -> dict[str, float]:
    """Of the first stage: held-out `loss` and `accuracy`, the largest attention `logit`, `load` (excess of the busiest
    expert), and where widths allow int4 experts, what they cost in nats."""
    assert recipe is not None, "the registry names one"
    read, beside = read_recipe(recipe, (*settings, f"out={folder}", f"seed={seed}")), Path(recipe).parent
    with execution_settings(read):
        builder = Builder(read, beside, folder)
        trainer = StageTrainer(read, builder, None)
        steps = trained(read, builder, trainer)
        rows = builder.rows(read.stage[0])
        batches = trainer.batches(read.stage[0], [rows.row(draw, "held out") for draw in range(HELD_OUT)])
        set_fake_int4(trainer.model, aware=False)
        plain = held_out(trainer.model, batches, Phase())
        found = {name.removeprefix("held-out "): value for name, value in plain.items()}
        found |= {"logit": _largest_logit(trainer.model, batches[0])}
        found |= {"load": fmean(one.get("excess load", 0.0) for one in steps[-LAST:])}
        try:
            check_widths(builder.cfg)
        except ConfigError:
            return found
        set_fake_int4(trainer.model, aware=True)
        return found | {"int4 costs": held_out(trainer.model, batches, Phase())["held-out loss"] - found["loss"]}


class _LogitView(PackedView):
    """Dense attention over sequences of one length that keeps its largest logit."""

    largest = 0.0

    def attend(self, layer_idx: int, q_THL: Tensor, selection: Selection, *, scale: float, value_dim: int) -> Tensor:
        q_BTHL, latent_BSL = q_THL.unflatten(0, (self.num_rows, -1)), self._latent_TL.unflatten(0, (self.num_rows, -1))
        logit_BHTS = torch.einsum("bthl,bsl->bhts", q_BTHL, latent_BSL) * scale
        self.largest = max(self.largest, logit_BHTS.tril().abs().max().item())
        return super().attend(layer_idx, q_THL, selection, scale=scale, value_dim=value_dim)


@torch.no_grad()
def _largest_logit(model: Glm5, batch: Batch) -> float:
    view = _LogitView(batch.lengths, stage="dense")
    model(batch.ids_T, view)
    return view.largest


def heads(_recipe: str | None, settings: tuple[str, ...], seed: int, _folder: Path) -> dict[str, float]:
    """`ratio` of the updates of heads with large gradients to those of heads with small ones."""
    count, rows = 16, 64
    found = measured(gradients(count, rows, 256, 100.0, seed), count, (rows,) if settings == ("split",) else ())
    large, small = halves(found.rms_H)
    return {"ratio": fmean(large) / fmean(small)}


def export(_recipe: str | None, _settings: tuple[str, ...], seed: int, _folder: Path) -> dict[str, float]:
    """`differ`: share of weights whose fake quantization and export are not equal to the bit."""
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)).bfloat16()
    there = int4(weight).dequantize(torch.bfloat16)
    return {"differ": (fake_int4(weight, stored=torch.bfloat16) != there).double().mean().item()}


def retokenise(_recipe: str | None, _settings: tuple[str, ...], seed: int, _folder: Path) -> dict[str, float]:
    """`changed`: share of sampled replies that tokenize to other tokens than were sampled."""
    folder, count, length = Path("models/mini"), 64, 64
    tokenizer = Tokenizer.from_dir(folder)
    prompts = [tokenizer.encode(f"{number} things about number {number * 7 + seed}: ") for number in range(count)]
    params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True)
    with LLM(str(folder), device="cpu", max_model_len=256, num_threads=1, seed=seed) as llm:
        replies = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
    changed = [tokenizer.encode(tokenizer.decode(ids)) != ids for ids in replies]
    return {"changed": fmean(changed)}
