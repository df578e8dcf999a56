"""What pushes do to the keys of conversations: `recompute`, `keep` and `keep-session`, side by side.

    python -m tests.support.key_policies OUT --seeds 3 --set steps=60

Environments answer late (latency.py), so that pushes come between the turns of a conversation. Prompt tokens are those
that the engine computed, again after pushes included.
"""

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

from glm5.config.rl import read_rl_recipe
from glm5.rl import loop
from glm5.rl.environments.workers import RemoteEpisode
from glm5.rl.rollouts.engines import Engines
from glm5.rl.watch import read_lines
from tests.support.latency import Latency, slow

ROWS = {
    "recompute": (),
    "keep": ("asynchronous.policy=keep",),
    "keep-session, age 1": ("asynchronous.policy=keep-session", "asynchronous.max_key_age=1"),
    "keep-session, age 4": ("asynchronous.policy=keep-session", "asynchronous.max_key_age=4"),
}
COMMON = ("asynchronous.max_staleness=4", "algorithm.name=dis", "records.every=0", "evaluation.tasks=1")
FIGURES = {
    "drift": "logp/abs_diff",
    "masked": "is/mask_frac",
    "older keys": "keys/older_frac",
    "oldest": "keys/age_max",
    "groups dropped": "staleness/dropped_groups",
}


def measure(out: Path, recipe: str, settings: tuple[str, ...]) -> dict[str, float]:
    """Figures of a run, means over its steps."""
    counted: list[dict[str, Any]] = []
    close = Engines.close

    async def counting(self: Engines) -> None:
        counted.extend([await engine.stats() for engine in self.alive])
        await close(self)

    Engines.close = counting
    try:
        loop.run(read_rl_recipe(recipe, (f"out={out}", *settings)), restart=True)
    finally:
        Engines.close = close
    lines = [one for one in read_lines(out / "metrics.jsonl") if "time/step" in one]
    trained = sum(one["perf/rollout_tok_s"] * one["time/step"] for one in lines)
    found = {name: mean(one[key] for one in lines) for name, key in FIGURES.items()}
    found["prompt tokens"] = sum(one["prefill"]["tokens"] for one in counted) / trained
    found["tokens a second"] = trained / sum(one["time/step"] for one in lines)
    found["reward"] = mean(one["reward/mean"] for one in lines[-10:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", default="recipes/rl-guess.toml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.3)
    parser.add_argument("--set", nargs="*", default=[])
    args = parser.parse_args()
    step = RemoteEpisode.step
    for row, settings in ROWS.items():
        runs: list[dict[str, float]] = []
        for seed in range(args.seeds):
            RemoteEpisode.step = step
            slow(Latency(seed, args.scale))
            runs.append(measure(args.out, args.recipe, (f"seed={seed}", *COMMON, *settings, *args.set)))
            print(f"{row}, seed {seed}:", ", ".join(f"{name} {value:.4g}" for name, value in runs[-1].items()))
        cells = [[one[name] for one in runs] for name in runs[0]]
        shown = [f"{mean(of):.3g} ({min(of):.3g} to {max(of):.3g})" for of in cells]
        print("|", row, "|", " | ".join(shown), "|")


if __name__ == "__main__":
    main()
