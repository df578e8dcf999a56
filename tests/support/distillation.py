"""Forgetting between two stages of RL, and what distillation gives back: `python -m tests.support.distillation OUT`.

    start     supervised steps on random replies to "Sort 4821" and "Reverse 4821"
    sort      RL on sorting              the first stage, whose last checkpoint teaches sorting
    reverse   RL on reversing            the second stage, the student; its own checkpoint teaches reversing
    distill   recipes/rl-distill.toml    top-k: the same with the teachers' 8 likeliest tokens
    sft       supervised steps from the student on samples of both teachers, as many tokens as `distill` had

Rewards are means over the same held-out tasks, greedy. Recovered: (after - forgotten) / (after sort - forgotten). Each
seed is a line of docs/performance/distillation.jsonl; what is there, and what OUT has of a run, is not done again.
"""

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from glm5.checkpoint.save import save
from glm5.common.atomic import atomic_write
from glm5.config.rl import RLRecipe, read_rl_recipe
from glm5.rl.build import PolicyBuilder
from glm5.rl.loop import run
from glm5.rl.records.store import Records, read_groups
from glm5.rl.trainer import PolicyTrainer, arithmetic
from glm5.rl.training.packing import pack
from glm5.rl.training.sequences import TrainingSequence, sequences_of
from glm5.rl.watch import read_metrics
from glm5.train.batch import Batch

REPO = Path(__file__).parents[2]
RESULTS = REPO / "docs/performance/distillation.jsonl"
STAGE, DISTILL = REPO / "recipes/rl-distill-stage.toml", REPO / "recipes/rl-distill.toml"
WARM_START = "warm_start={steps=60, conversations=64, lr=3e-3}"
UNTRAINED = ("steps=1", "lr=1e-12", "rollouts.group_size=1")  # in a group of one no reward is better than the group's
SKILLS = ("sort", "reverse")
AFTER = ("start", "sort", "reverse", "distill", "top-k", "sft")
EVALUATED_ONLY = 1e-9
"""Weight of an environment whose tasks are evaluated, and too rare to be drawn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for seed in args.seeds:
        if seed not in kept():
            found = measured(args.out / f"seed-{seed}", seed)
            results = kept() | {seed: found}
            with atomic_write(RESULTS) as handle:
                handle.writelines(json.dumps(results[one]) + "\n" for one in sorted(results))
    results = kept()
    print("\n".join(table([results[seed] for seed in args.seeds])))


def kept() -> dict[int, dict[str, Any]]:
    """Results by seed."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {one["seed"]: one for one in map(json.loads, lines)}


def measured(out: Path, seed: int) -> dict[str, Any]:
    """All runs of a seed, and what came of them."""
    folders = {name: out / name for name in AFTER}
    play(STAGE, folders["start"], seed, WARM_START, *UNTRAINED)
    play(STAGE, folders["sort"], seed, begins_with(folders["start"]), trained("sort"))
    play(STAGE, folders["reverse"], seed, begins_with(folders["sort"]), trained("reverse"))
    teachers = [f"teacher.{i}.checkpoint={folders[name] / 'policy'}" for i, name in enumerate(SKILLS)]
    taught = f"model.checkpoint={folders['reverse'] / 'policy'}", *teachers
    distill = play(DISTILL, folders["distill"], seed, *taught)
    play(DISTILL, folders["top-k"], seed, *taught, "algorithm.teacher_top_k=8")
    num_tokens = sum(len(one.tree.segments[-1].token_ids) for one in rollouts(folders["distill"]))
    imitate(distill, [sampled(out, name, seed) for name in SKILLS], folders["sft"])
    last = {name: evaluated(folders[name]) for name in AFTER}
    kl = [
        [line[f"teacher_kl/{teacher.name}/{skill}"] for teacher, skill in zip(distill.teacher, SKILLS, strict=True)]
        for line in read_metrics(folders["distill"])
        if "reward/mean" in line
    ]
    steps = {name: read_rl_recipe(STAGE, (trained(name),)).steps for name in SKILLS} | {"distill": distill.steps}
    seconds = {name: sum(line.get("time/step", 0.0) for line in read_metrics(folders[name])) for name in AFTER[1:5]}
    return {
        "seed": seed,
        "processor": platform.processor() or platform.machine(),
        "steps": steps,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "distilled_tokens": num_tokens,
        "teacher_kl": {"first": kl[0], "last": kl[-1]},
        **{skill: {name: last[name][f"eval/{skill}"] for name in AFTER} for skill in SKILLS},
    }


def play(file: Path, out: Path, seed: int, *settings: str) -> RLRecipe:
    """A run to its end, or what is left of it."""
    recipe = read_rl_recipe(file, (f"out={out}", f"seed={seed}", *settings))
    run(recipe)
    return recipe


def begins_with(folder: Path) -> str:
    return f'model={{checkpoint="{folder / "policy"}"}}'


def trained(skill: str) -> str:
    """The setting with which a stage trains one skill, and evaluates both."""
    other = SKILLS[1 - SKILLS.index(skill)]
    return f'environment=[{{name="{skill}"}}, {{name="{other}", weight={EVALUATED_ONLY}}}]'


def evaluated(out: Path) -> dict[str, float]:
    """The last evaluation of a run."""
    return [line for line in read_metrics(out) if "eval/mean" in line][-1]


def rollouts(out: Path) -> Iterator[Any]:
    records = Records(out)
    for step in records.steps():
        yield from (one for group in read_groups(records, step) for one in group.rollouts)


def sampled(out: Path, skill: str, seed: int) -> list[TrainingSequence]:
    """Samples of a teacher: half of what distillation sampled, of a run that learns nothing."""
    recipe = read_rl_recipe(DISTILL)
    settings = (f"steps={recipe.steps}", f"rollouts.groups={recipe.rollouts.groups // 2}", *UNTRAINED[1:])
    folder = out / f"samples-of-{skill}"
    every = f"evaluation.every={recipe.steps}"
    play(STAGE, folder, seed, begins_with(out / skill), f'environment=[{{name="{skill}"}}]', every, *settings)
    return [each for one in rollouts(folder) for each in sequences_of(one, 1.0, 1, "token-mean")]


def imitate(recipe: RLRecipe, samples: Sequence[Sequence[TrainingSequence]], out: Path) -> None:
    """Cross-entropy on samples, with the optimizer, rates, steps and tokens of `recipe`; then its evaluation."""
    model = out / "model"
    if not model.exists():
        device = torch.device("cpu")
        with arithmetic(recipe, device):
            trainer = PolicyTrainer(recipe, PolicyBuilder(recipe, out), device)
            for step in range(recipe.steps):
                size = recipe.rollouts.groups // len(samples)
                chosen = [one for of_skill in samples for one in of_skill[step * size : (step + 1) * size]]
                packed = pack(chosen, recipe.pass_tokens)[0]
                trainer.step.run([batch_of([chosen[i] for i in part]) for part in packed], recipe.lr_at(step))
            save(trainer.model, model, assets=trainer.builder.assets)
    play(STAGE, out, recipe.seed, f'model={{checkpoint="{model}"}}', *UNTRAINED)


def batch_of(sequences: Sequence[TrainingSequence]) -> Batch:
    ids = torch.cat([torch.from_numpy(one.ids) for one in sequences])
    weights = torch.cat([torch.from_numpy(one.columns["policy"]).float() for one in sequences])
    return Batch(ids, weights, [len(one) for one in sequences])


def recovered(result: dict[str, Any], after: str) -> float:
    """Share of what `reverse` took from `sort`."""
    sort = result["sort"]
    return (sort[after] - sort["reverse"]) / (sort["sort"] - sort["reverse"])


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown: rewards after each stage by seed, and shares of the lost gap that are back."""
    yield "| after | " + " | ".join(f"{skill}, by seed | mean" for skill in SKILLS) + " | back |"
    yield "|---|---|---|---|---|---|"
    for name in AFTER:
        cells = list[str]()
        for skill in SKILLS:
            values = [one[skill][name] for one in results]
            spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
            cells += [", ".join(f"{value:.3f}" for value in values), f"{fmean(values):.3f}{spread}"]
        back = ", ".join(f"{recovered(one, name):.0%}" for one in results) if name in AFTER[3:] else ""
        yield f"| {name} | {' | '.join(cells)} | {back} |"


if __name__ == "__main__":
    main()
