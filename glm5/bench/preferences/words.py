"""Generated preferences with a known scoring rule and known label noise.

    reward   an answer is some words, its true score s the sum of their hidden values
    dpo      an answer is one word, and its value depends on the prompt too
    label    the first answer is chosen with probability sigmoid(s_first - s_second)      (Bradley-Terry)

So a scorer that knows the rule has the best accuracy and loss that there is, and the best policy under DPO's objective
is pi*(word) = pi_ref(word) exp(s / beta) / Z, the same for every data set of this kind (Rafailov et al. 2023, equation
4). Both are computed here.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5.common.atomic import atomic_write

WORDS = (
    *("red", "sun", "oak", "ice", "tin", "fog", "pie", "jam", "owl", "ant", "bee", "cup"),
    *("hat", "ink", "key", "log", "map", "net", "pen", "rug", "sky", "toy", "van", "web"),
)
PROMPTS = ("rain", "gold", "milk", "wolf")
LEAST, MOST = 3, 6
"""Words of an answer that the reward model scores."""
RULE_SEED = 28
"""The hidden values are the same for all seeds of a training."""


def word_values() -> dict[str, float]:
    """Of the reward model's rule; their mean is 0."""
    random = Random(RULE_SEED)
    values = [random.gauss(0, 0.7) for _ in WORDS]
    return {word: value - sum(values) / len(values) for word, value in zip(WORDS, values, strict=True)}


def prompt_values() -> NDArray[np.float64]:
    """Of DPO's rule, [prompts, words]."""
    random = Random(RULE_SEED + 1)
    return np.array([[random.gauss(0, 1) for _ in WORDS] for _ in PROMPTS])


def scored_pairs(random: Random, count: int) -> list[tuple[str, str, float]]:
    """(chosen, rejected, s_chosen - s_rejected) of answers of words, labelled with noise."""
    values = word_values()
    found: list[tuple[str, str, float]] = []
    while len(found) < count:
        answers = [[random.choice(WORDS) for _ in range(random.randint(LEAST, MOST))] for _ in range(2)]
        scores = [sum(map(values.__getitem__, answer)) for answer in answers]
        if answers[0] != answers[1]:
            first = _is_first(random, scores[0] - scores[1])
            a, b = (0, 1) if first else (1, 0)
            found.append((" ".join(answers[a]), " ".join(answers[b]), scores[a] - scores[b]))
    return found


def prompted_pairs(random: Random, count: int) -> list[tuple[str, str, str]]:
    """(prompt, chosen, rejected) of answers of a word, drawn evenly and labelled with noise."""
    values = prompt_values()
    found: list[tuple[str, str, str]] = []
    for _ in range(count):
        prompt, (one, two) = random.randrange(len(PROMPTS)), random.sample(range(len(WORDS)), 2)
        a, b = (one, two) if _is_first(random, values[prompt, one] - values[prompt, two]) else (two, one)
        found.append((PROMPTS[prompt], WORDS[a], WORDS[b]))
    return found


def best_policy(reference: NDArray[np.float64], beta: float) -> NDArray[np.float64]:
    """pi* [prompts, words] for the probabilities of a reference."""
    weight = reference * np.exp(prompt_values() / beta)
    return weight / weight.sum(axis=1, keepdims=True)


def write_reward_data(folder: Path, seed: int, num_pairs: int) -> None:
    """pairs.jsonl and, for the tokenizer, words.txt."""
    pairs = scored_pairs(Random(f"train {seed}"), num_pairs)
    _write(folder, "pairs.jsonl", (row("rate", chosen, rejected) for chosen, rejected, _ in pairs))


def write_dpo_data(folder: Path, seed: int, num_pairs: int) -> None:
    """Also answers.jsonl: every answer as often, which the policy is taught before."""
    pairs = prompted_pairs(Random(f"train {seed}"), num_pairs)
    _write(folder, "pairs.jsonl", (row(*one) for one in pairs))
    told = [{"messages": talk(prompt, word), "thinking": "off"} for prompt in PROMPTS for word in WORDS]
    Random(seed).shuffle(told)
    _write(folder, "answers.jsonl", told)


def row(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "thinking": "off"}


def talk(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def best_accuracy(differences: Sequence[float]) -> float:
    """Of whoever knows the true scores, on labels that are as noisy: the mean of max(p, 1 - p)."""
    return sum(1 / (1 + math.exp(-abs(one))) for one in differences) / len(differences)


def _is_first(random: Random, difference: float) -> bool:
    return random.random() < 1 / (1 + math.exp(-difference))


def _write(folder: Path, name: str, rows: Iterable[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / name) as handle:
        handle.writelines(json.dumps(one) + "\n" for one in rows)
    with atomic_write(folder / "words.txt") as handle:
        handle.write("\n".join([*(f"{word} {word}" for word in (*WORDS, *PROMPTS, "rate"))] * 4))
