"""`python -m glm5.bench.preferences`: a reward model and DPO on generated pairs of known truth, over seeds.

Each seed has data of its own; the hidden rule is the same. The reward model is measured on fresh pairs: accuracy beside
the best that the label noise allows, and calibration before and after the temperature, which was fitted on the recipe's
held-out pairs. Of DPO, the mean true value of an answer is computed exactly, beside that of the reference and of the
best policy. Writes preferences.jsonl, a line a run, and a table. Finished runs are kept.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm5.bench.command import command
from glm5.bench.preferences import words
from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.load import load
from glm5.common.atomic import atomic_write
from glm5.common.console import out
from glm5.config.train import Recipe, read_recipe
from glm5.model.packed import PackedView
from glm5.train.batch import Batch
from glm5.train.calibration import accuracy, calibration_error, mean_loss
from glm5.train.data.chat import conversation_ids, examples_of
from glm5.train.loop import train
from glm5.train.preference import BETA, answer_logprobs
from glm5.train.reward_model import RewardModel

PARTS = {"reward": Path("recipes/reward-words.toml"), "dpo": Path("recipes/dpo-words.toml")}
TEST_PAIRS = 2000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="glm5.bench.preferences", description=__doc__)
    parser.add_argument("--part", choices=list(PARTS), help="default: both")
    parser.add_argument("--out", type=Path, default=Path("runs/preferences"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--pairs", type=int, default=2000, help="of a run, those that are held out included")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the recipe")
    args = parser.parse_args(argv)

    lines: list[dict[str, Any]] = []
    for part in PARTS if args.part is None else [args.part]:
        for seed in args.seeds:
            data, folder = args.out / f"{part}-{seed}-data", args.out / f"{part}-{seed}"
            recipe = read_recipe(PARTS[part], [f"out={folder}", f"seed={seed}", *args.set])
            (words.write_reward_data if part == "reward" else words.write_dpo_data)(data, seed, args.pairs)
            checkpoint = train(recipe, data)
            measured = reward_line(folder) if part == "reward" else dpo_line(recipe, folder)
            lines.append({"part": part, "seed": seed, "pairs": args.pairs, "set": args.set, **measured})
            out(f"{part} {seed}, {checkpoint}: {json.dumps(measured)}")
    with atomic_write(args.out / "preferences.jsonl") as handle:
        handle.writelines(json.dumps(line) + "\n" for line in lines)
    out(table(lines))
    return 0


def reward_line(folder: Path) -> dict[str, Any]:
    """Figures of the last reward model on fresh pairs, and of whoever knows the rule."""
    model = RewardModel.load(folder / "reward" / "last")
    template = _template(folder)
    pairs = words.scored_pairs(Random("test"), TEST_PAIRS)
    conversations = [
        conversation_ids({"messages": words.talk("rate", answer), "thinking": "off"}, template)
        for pair in pairs
        for answer in pair[:2]
    ]
    score = np.array(model.score(conversations))
    found, true = score[::2] - score[1::2], np.array([pair[2] for pair in pairs])
    temperature = model.calibration.temperature
    return {
        "accuracy": accuracy(found),
        "best_accuracy": words.best_accuracy(true.tolist()),
        "accuracy_of_rule": accuracy(true),
        "agrees_with_rule": accuracy(found * np.sign(true)),
        "loss": mean_loss(found * temperature),
        "calibrated_loss": mean_loss(found),
        "loss_of_rule": mean_loss(true),
        "calibration_error": calibration_error(found * temperature),
        "calibrated_error": calibration_error(found),
        "calibration_error_of_rule": calibration_error(true),
        "temperature": temperature,
    }


def dpo_line(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The mean true value of an answer before and after DPO, of the best policy and of the best word; and how far the
    policy is from the best one."""
    beta = recipe.stage[-1].beta or BETA
    reference, policy = (_answers(folder / stage / "last", _template(folder)) for stage in ("sft", "dpo"))
    best, values = words.best_policy(reference, beta), words.prompt_values()
    return {
        "value_of_reference": _mean_value(reference, values),
        "value": _mean_value(policy, values),
        "best_value": _mean_value(best, values),
        "value_of_best_word": float(values.max(axis=1).mean()),
        "kl_of_reference": _divergence(best, reference),
        "kl": _divergence(best, policy),
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Mean, standard deviation and least and largest over seeds."""
    rows = ["| part | figure | mean | sd | least | largest |", "|---|---|---|---|---|---|"]
    for part in dict.fromkeys(line["part"] for line in lines):
        own = [line for line in lines if line["part"] == part]
        for name in (name for name, value in own[0].items() if isinstance(value, float)):
            values = [line[name] for line in own]
            spread = stdev(values) if len(values) > 1 else math.nan
            figures = (fmean(values), spread, min(values), max(values))
            rows.append(f"| {part} | {name} | {' | '.join(f'{one:.3f}' for one in figures)} |")
    return "\n".join(rows)


def _template(folder: Path) -> ChatTemplate:
    return ChatTemplate.for_checkpoint(folder / "tokenizer", tokenizer=Tokenizer.from_dir(folder / "tokenizer"))


@torch.no_grad()
def _answers(checkpoint: Path, template: ChatTemplate) -> NDArray[np.float64]:
    """The probability of each word as the answer to each prompt, among the words."""
    model, found = load(checkpoint), list[list[float]]()
    for prompt in words.PROMPTS:
        rows = [{"messages": words.talk(prompt, word), "thinking": "off"} for word in words.WORDS]
        examples = [examples_of(row, template, prompt)[0] for row in rows]
        ids_T = torch.tensor([one for example in examples for one in example.ids])
        marks_T = torch.tensor([float(one) for example in examples for one in example.marks])
        batch = Batch(ids_T, marks_T, [len(example.ids) for example in examples])
        hidden_TD = model(ids_T, PackedView(batch.lengths, model.device))
        found.append(answer_logprobs(model, hidden_TD, batch, 4096).double().tolist())
    probability = np.exp(np.array(found))
    return probability / probability.sum(axis=1, keepdims=True)


def _mean_value(policy: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    return float((policy * values).sum(axis=1).mean())


def _divergence(of: NDArray[np.float64], from_: NDArray[np.float64]) -> float:
    """KL(of || from), the mean over prompts, in nats."""
    return float((of * np.log(of / from_)).sum(axis=1).mean())


if __name__ == "__main__":
    sys.exit(command(main))
