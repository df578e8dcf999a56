"""What the changes of a training step take of all weights, as files: `python -m tests.support.delta_bytes`.

Supervised steps of `recipes/rl-guess.toml` with AdamW and usual initial weights; the first steps, whose changes are
larger, are left out. Copies in bfloat16 of weights in float32 are what engines get.
"""

from itertools import islice
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch

from glm5.checkpoint.versions import WeightFolder
from glm5.config.rl import read_rl_recipe
from glm5.rl.build import PolicyBuilder
from glm5.rl.shown import shown_examples
from glm5.rl.trainer import PolicyTrainer, _supervised

FIRST, STEPS, CONVERSATIONS = 10, 20, 16
SETTINGS = (
    "optimizer.kind=adamw",
    "optimizer.betas=[0.9, 0.95]",
    "optimizer.embedding_lr=1.0",
    "model.unit_scale=false",
    "model.embedding_std=0.02",
    "model.residual_scale=1.0",
)


def shares(out: Path, lr: float, compute: str) -> list[float]:
    """Bytes of each step's changes, of those of all weights."""
    recipe = read_rl_recipe("recipes/rl-guess.toml", (*SETTINGS, f"model.compute={compute}", "exact=false"))
    builder = PolicyBuilder(recipe, out)
    trainer, folder = PolicyTrainer(recipe, builder, torch.device("cpu")), WeightFolder(out / "weights", deltas=True)
    found = list[float]()
    with shown_examples(recipe, builder.assets) as shown:
        for step in range(FIRST + STEPS + 1):
            examples = list(islice(shown, CONVERSATIONS))
            trainer.step.run([_supervised(examples)], lr)
            if step >= FIRST:
                folder.publish(trainer.weights(), step)
                found.append(folder.num_bytes)
    return [one / found[0] for one in found[1:]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for compute, lr in [("bfloat16", lr) for lr in (1e-6, 1e-5, 1e-4, 1e-3)] + [("float32", 1e-5)]:
        with TemporaryDirectory() as folder:
            of_steps = shares(Path(folder), lr, compute)
        print(f"{compute} {lr:g}: mean {fmean(of_steps):.3f}, {min(of_steps):.3f} to {max(of_steps):.3f}", flush=True)
