"""`python -m glm5.bench.drafts RECIPE`: tokens per verification, for one trained depth of the MTP layer and for three.

Every model is trained on the recipe with its depth and seed, and then drafts 1 to 5 tokens a step in the engine, which
counts: 1 + accepted / verifications, greedy and sampled, after prompts of held-out text. An interrupted run continues;
a trained model is not trained again.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from glm5.bench.command import command
from glm5.common.atomic import atomic_write
from glm5.common.console import out
from glm5.config.train import Recipe, read_recipe
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.train.build import Builder
from glm5.train.loop import train

STEPS = (1, 2, 3, 4, 5)
PROMPT_LEN, ANSWER_LEN = 32, 96
REQUESTS = 64
WAYS = {"greedy": 0.0, "sampled": 1.0}


class Measured(NamedTuple):
    """Tokens per verification of one model with `steps` drafts a step. `way`: greedy or sampled."""

    depth: int
    seed: int
    steps: int
    way: str
    verifications: int
    tokens: float


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="glm5.bench.drafts", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/drafts"))
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--verifications", type=int, default=5000, help="of each figure, at least")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the recipe")
    args = parser.parse_args(argv)

    found: list[Measured] = []
    for depth in args.depths:
        for seed in args.seeds:
            folder = args.out / f"depth-{depth}-seed-{seed}"
            settings = [f"out={folder}", f"losses.mtp_depth={depth}", f"seed={seed}", *args.set]
            recipe = read_recipe(args.recipe, settings)
            model = train(recipe, args.recipe.parent)
            found += _measured(recipe, args.recipe.parent, model, (depth, seed), args.verifications)
    out(table(found))
    with atomic_write(args.out / "drafts.json") as handle:
        handle.write(json.dumps([one._asdict() for one in found], indent=1) + "\n")
    return 0


def table(found: Sequence[Measured]) -> str:
    """Mean over seeds, and in brackets the least and the largest, by depth and way for each number of drafts."""
    steps = sorted({one.steps for one in found})
    lines = ["".join([f"{'drafted':16}", *(f"{number:>19}" for number in steps)])]
    for depth in sorted({one.depth for one in found}):
        for way in WAYS:
            cells: list[str] = []
            for number in steps:
                some = [one.tokens for one in found if (one.depth, one.way, one.steps) == (depth, way, number)]
                cells.append(f"{statistics.mean(some):5.2f} ({min(some):.2f} to {max(some):.2f})")
            lines.append("".join([f"depth {depth}, {way:8}"[:16].ljust(16), *(f"{cell:>19}" for cell in cells)]))
    fewest = min(one.verifications for one in found)
    return "\n".join([*lines, f"tokens per verification; each of at least {fewest:,} verifications"])


def _measured(
    recipe: Recipe, beside: Path, model: Path, who: tuple[int, int], min_verifications: int
) -> list[Measured]:
    file = recipe.folder / "drafts.json"
    if file.exists():
        return [Measured(**one) for one in json.loads(file.read_text(encoding="utf-8"))]
    rows = Builder(recipe, beside, recipe.folder).rows(recipe.stage[-1])
    prompts = [rows.row(draw, "held out").ids[:PROMPT_LEN].tolist() for draw in range(REQUESTS)]
    found: list[Measured] = []
    for steps in STEPS:
        drafting = {"num_speculative_tokens": steps, "adaptive_speculation": False, "enable_prefix_caching": False}
        with LLM(model, device="cpu", max_model_len=PROMPT_LEN + ANSWER_LEN + 16, seed=who[1], **drafting) as llm:
            found += [_measured_way(llm, prompts, way, min_verifications, who, steps) for way in WAYS]
            out(f"depth {who[0]} seed {who[1]}: {', '.join(f'{one.way} {one.tokens:.3f}' for one in found[-2:])}")
    with atomic_write(file) as handle:
        handle.write(json.dumps([one._asdict() for one in found]) + "\n")
    return found


def _measured_way(
    llm: LLM, prompts: list[list[int]], way: str, min_verifications: int, who: tuple[int, int], steps: int
) -> Measured:
    """Generate until enough drafts were verified. Prompts get one token shorter every round, because greedy answers to
    the same prompts would be the same."""
    before = llm.stats()["speculation"]
    verified = accepted = 0
    num_cut = 0
    while verified < min_verifications:
        params = SamplingParams(temperature=WAYS[way], max_tokens=ANSWER_LEN, ignore_eos=True)
        llm.generate([prompt[: PROMPT_LEN - num_cut] for prompt in prompts], params, use_tqdm=False)
        now = llm.stats()["speculation"]
        verified = now["drafted"][0] - before["drafted"][0]
        accepted = sum(now["accepted"]) - sum(before["accepted"])
        num_cut += 1
    return Measured(*who, steps, way, verified, 1 + accepted / verified)


if __name__ == "__main__":
    sys.exit(command(main))
