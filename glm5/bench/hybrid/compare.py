"""Runs of a recipe with each of its sources of reward alone and together, over SEEDS.

Each seed has a reward model of its own, learnt from comparisons by people (PAIRS of them), and anchors of its own: the
answers that people wrote to every fifth of the tasks that are trained on.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from statistics import fmean, stdev
from time import monotonic
from typing import Any

import torch
from torch.nn import functional as F

from glm5.bench.hybrid.judge import position_bias
from glm5.bench.hybrid.task import Comfort, compared
from glm5.checkpoint.save import save
from glm5.common.atomic import atomic_write
from glm5.common.errors import ConfigError
from glm5.config.bench_hybrid import BenchHybridConfig
from glm5.config.rl import RLRecipe, read_rl_recipe
from glm5.model.packed import PackedView
from glm5.rl.build import PolicyBuilder
from glm5.rl.loop import Run
from glm5.rl.trainer import arithmetic
from glm5.rl.watch import FILE, read_lines
from glm5.train.reward_model import RewardModel, last_rewards
from glm5.train.state import locked

SEEDS = (0, 1, 2)
PAIRS, HELD_OUT, STEPS, BATCH, LR = 1024, 512, 120, 64, 1e-3
"""Of the reward model: pairs to learn from, held-out ones, steps, pairs of a step, and the rate, which falls to 0."""
PAIRS_FROM = 10_000
"""Seed of the first task that people compared answers to; those that are trained on come before."""
_NO_GUARDS = "guards.length=0 guards.repetition=0"
_NO_ANCHORS = "anchors.ce=0 anchors.members=false"
ARMS = {
    "hybrid": "",
    "rules alone": f"model.weight=0 {_NO_GUARDS} {_NO_ANCHORS}",
    "reward model alone": f"rules.weight=0 {_NO_GUARDS} {_NO_ANCHORS}",
    "hybrid without anchors": _NO_ANCHORS,
    "anchors alone": f"model.weight=0 rules.weight=1e-9 {_NO_GUARDS} anchors.members=false",
    "rules and reward model": f"{_NO_GUARDS} {_NO_ANCHORS}",
}
CLAIMED = ("hybrid", "rules alone", "reward model alone")
"""What each arm sets of the recipe's [reward] (anchors alone: advantages are below 1e-2), and those that run first."""


def recipe_of(settings: BenchHybridConfig, arm: str, seed: int, out: str | Path) -> RLRecipe:
    plain, given = read_rl_recipe(settings.recipe, settings.set), Path(settings.out, f"seed-{seed}")
    if plain.reward is None or plain.reward.model is None or plain.reward.anchors is None:
        raise ConfigError(f"{settings.recipe}: reward.model and reward.anchors are compared; add them")
    own = [f"out={out}", f"seed={seed}", f"reward.model.folder={given / 'reward-model'}"]
    own.append(f"reward.anchors.file={given / 'anchors.jsonl'}")
    own += [f"reward.{one}" for one in ARMS[arm].split()]
    return read_rl_recipe(settings.recipe, (*settings.set, *own))


def play(settings: BenchHybridConfig, arm: str, seed: int) -> dict[str, Any]:
    """The line of a run in runs.jsonl."""
    recipe, began = recipe_of(settings, arm, seed, Path(settings.out, "run")), monotonic()
    shutil.rmtree(recipe.folder, ignore_errors=True)
    recipe.folder.mkdir(parents=True)
    with (recipe.folder / "log.txt").open("w", encoding="utf-8") as log, redirect_stderr(log):
        device = torch.device("cpu")
        with arithmetic(recipe, device):
            asyncio.run(Run(recipe, recipe.folder, device, unsafe_local=False, open_gateway=None).run())
    lines = read_lines(recipe.folder / FILE)
    held_out = [{key: line[f"eval/{key}"] for key in ("proxy", "true")} for line in lines if "eval/true" in line]
    curve = [[round(line[f"metric/{key}"], 3) for key in ("proxy", "true")] for line in lines if "metric/true" in line]
    shutil.rmtree(recipe.folder)
    found = {"step": len(curve), "arm": arm, "seed": seed, "held_out": held_out, "curve": curve}
    return found | {"seconds": round(monotonic() - began, 1)}


def prepare(settings: BenchHybridConfig, seed: int) -> dict[str, Any]:
    """Write the reward model and the anchors of a seed; returns the accuracy on held-out pairs, of what people
    preferred."""
    out = Path(settings.out, f"seed-{seed}")
    (out / "start").mkdir(parents=True, exist_ok=True)
    recipe = recipe_of(settings, "rules alone", seed, out / "start")
    environment, (section, *_) = Comfort(), recipe.environment
    with atomic_write(out / "anchors.jsonl") as handle:
        for task in (environment.task(number, 0) for number in range(0, section.tasks or 0, 5)):
            said = {"role": "assistant", "content": environment.oracle(task)[0].content}
            handle.write(json.dumps({"messages": [*task.messages, said]}) + "\n")
    with arithmetic(recipe, torch.device("cpu")):
        return {"accuracy": _reward_model(PolicyBuilder(recipe, out / "start"), out / "reward-model", seed)}


def _reward_model(builder: PolicyBuilder, out: Path, seed: int) -> float:
    pairs = [
        [builder.chat.conversation(chat)[0] for chat in pair] for pair in compared(PAIRS_FROM, PAIRS + HELD_OUT, seed)
    ]
    if not (out / "config.json").exists():
        _train(builder, out, pairs[:PAIRS])
    learnt = RewardModel.load(out)
    scores = [learnt.score([pair[side] for pair in pairs[PAIRS:]]) for side in (0, 1)]
    return fmean(float(better > worse) for better, worse in zip(*scores, strict=True))


def _train(builder: PolicyBuilder, out: Path, pairs: Sequence[Sequence[Sequence[int]]]) -> None:
    model = builder.model(torch.device("cpu"))
    model.add_value_head()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for step in range(STEPS):
        chosen = [pairs[(step * BATCH + i) % PAIRS] for i in range(BATCH)]
        sequences = [ids for side in (0, 1) for ids in (pair[side] for pair in chosen)]
        lengths = [len(ids) for ids in sequences]
        ids_T = torch.tensor([one for ids in sequences for one in ids])
        hidden_TD = model(ids_T, PackedView(lengths, model.device, stage="sparse"))
        better_B, worse_B = last_rewards(model, hidden_TD, lengths).chunk(2)
        optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        optimizer.zero_grad()
        (-F.logsigmoid(better_B - worse_B).mean()).backward()
        optimizer.step()
    save(model, out, assets=builder.assets)


def measure(settings: BenchHybridConfig, say: Callable[[str], None]) -> str:
    """Run what is missing; returns the table as Markdown. Raises ConfigError, and TrainingError where OUT is in use."""
    file, plain = Path(settings.out, "runs.jsonl"), read_rl_recipe(settings.recipe, settings.set)
    key, about = plain.model_dump_json(exclude_defaults=True), dict[int, dict[str, Any]]()
    with locked(file.parent):
        done = {(line["arm"], line["seed"]): line for line in read_lines(file) if line["recipe"] == key}
        jobs = [(arm, seed) for arm in ARMS for seed in SEEDS[: settings.seeds]]
        jobs.sort(key=lambda job: job[0] not in CLAIMED)
        for arm, seed in (job for job in jobs if job not in done):
            if seed not in about:
                about[seed] = prepare(settings, seed)
                share = about[seed]["accuracy"]
                say(f"seed {seed}: the reward model agrees with people on {share:.0%} of held-out pairs")
            line = done[arm, seed] = play(settings, arm, seed) | about[seed] | {"recipe": key}
            say(f"{arm}, seed {seed}: true {line['held_out'][-1]['true']:.3f}, {line['seconds']:.0f} s")
            with file.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line) + "\n")
        for seed in (seed for seed in SEEDS[: settings.seeds] if ("judge", seed) not in done):
            recipe = recipe_of(settings, "rules alone", seed, Path(settings.out, f"seed-{seed}", "start"))
            with arithmetic(recipe, torch.device("cpu")):
                found = position_bias(PolicyBuilder(recipe, recipe.folder), seed)
            line = done["judge", seed] = {"step": 0, "arm": "judge", "seed": seed, "judge": found, "recipe": key}
            with file.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line) + "\n")
    lines = list(done.values())
    return f"{table(lines)}\n\n{judge_table(lines)}"


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Proxy and true reward on held-out tasks before the first step and after the last, mean ± standard deviation."""
    rows = ["| reward | proxy before | proxy after | true before | most true | true after |", "| --- " * 6 + "|"]
    for arm in ARMS:
        held_out = [line["held_out"] for line in lines if line["arm"] == arm]
        columns = [[of[at][key] for of in held_out] for key in ("proxy", "true") for at in (0, -1)]
        columns.insert(3, [max(one["true"] for one in of) for of in held_out])
        shown = [f"{fmean(column):.2f} ± {stdev(column) if len(column) > 1 else 0:.2f}" for column in columns if column]
        rows.append(f"| {' | '.join([arm, *shown])} |")
    return "\n".join(rows)


def judge_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The small judge's verdicts on held-out pairs, mean ± standard deviation."""
    found = [line["judge"] for line in lines if line["arm"] == "judge"]
    rows = ["| verdicts of the small judge | share |", "| --- | --- |"]
    for name in found[0]:
        values = [one[name] for one in found]
        rows.append(f"| {name} | {fmean(values):.2f} ± {stdev(values) if len(values) > 1 else 0:.2f} |")
    return "\n".join(rows)
