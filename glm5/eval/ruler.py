"""RULER-like tasks (train/data/ruler.py), answered by the engine with greedy decoding.

A prompt is completed without a chat template: it ends where the answer begins. An answer may be twice as long as the
correct one.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from glm5.chat.special import END_OF_TEXT
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import DataError
from glm5.common.progress import Progress
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.train.data.ruler import TASKS, Sample, generate, score

logger = logging.getLogger(__name__)

MARGIN_TOKENS = 8
"""Tokens of a sample that stay unused: prompt and answer are encoded separately, and an end token follows."""


@dataclass(frozen=True)
class Question:
    """A sample as token ids: the prompt, and the correct answer with its end token."""

    sample: Sample
    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class Score:
    """The result of a task at a length: the mean over samples of the share of answers found, and its standard error."""

    task: str
    length: int
    num_samples: int
    prompt_tokens: int
    accuracy: float
    error: float


class Answerer(Protocol):
    """Returns an answer for each sample, in order."""

    def __call__(self, items: Sequence[Question]) -> list[str]: ...


def tasks_of(names: Sequence[str]) -> tuple[str, ...]:
    """The named tasks, or all if none is named. Raises DataError for an unknown name."""
    if unknown := [name for name in names if name not in TASKS]:
        raise DataError(f"tasks: got {unknown[0]!r:.60}; allowed: {', '.join(TASKS)}")
    return tuple(names) or tuple(TASKS)


def make(tokenizer: Tokenizer, task: str, length: int, numbers: range, seed: int = 0) -> list[Question]:
    """Samples by number; the same for the same seed, task, length and tokenizer."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, allow_special=False)

    end = [] if (end_id := tokenizer.id_of(END_OF_TEXT)) is None else [end_id]
    samples = [
        generate(task, length - MARGIN_TOKENS, number, lambda text: len(encode(text)), seed) for number in numbers
    ]
    return [Question(sample, encode(sample.prompt), encode(sample.answer) + end) for sample in samples]


def by_engine(llm: LLM) -> Answerer:
    """Greedy answers of the engine."""

    def answer(items: Sequence[Question]) -> list[str]:
        params = [SamplingParams(temperature=0.0, max_tokens=2 * len(each.answer_ids)) for each in items]
        outputs = llm.generate([each.prompt_ids for each in items], params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    return answer


def evaluate(
    answer: Answerer,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    lengths: Sequence[int],
    num_samples: int,
    seed: int = 0,
) -> Iterator[Score]:
    """Scores of each task, the shortest length first. A task that does not fit a length is skipped with a warning."""
    total = len(tasks) * len(lengths) * num_samples
    with Progress(total=total, unit="sample", desc="ruler") as progress:
        for length in sorted(lengths):
            for task in tasks:
                try:
                    items = make(tokenizer, task, length, range(num_samples), seed)
                except DataError as error:
                    logger.warning("left out: %s", error)
                    progress.update(num_samples)
                    continue
                found = [score(each.sample, text) for each, text in zip(items, answer(items), strict=True)]
                mean = sum(found) / num_samples
                variance = sum((one - mean) ** 2 for one in found) / max(1, num_samples - 1)
                tokens = sum(len(each.prompt_ids) for each in items)
                progress.update(num_samples, task=task, length=length, accuracy=mean)
                yield Score(task, length, num_samples, tokens, mean, math.sqrt(variance / num_samples))


def document(scores: Sequence[Score], about: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON document: `about`, each score, and the mean over tasks by length."""
    lengths = sorted({score.length for score in scores})
    mean = {str(length): _mean([score for score in scores if score.length == length]) for length in lengths}
    return {**about, "scores": [vars(score) for score in scores], "mean": mean}


def table(scores: Sequence[Score]) -> str:
    """Percent by task and length, the mean of the tasks last. `-`: the task does not fit."""
    lengths = sorted({score.length for score in scores})
    tasks = list(dict.fromkeys(score.task for score in scores))
    cells = {(score.task, score.length): f"{100 * score.accuracy:.1f}" for score in scores}
    rows = [["task", *map(str, lengths)]]
    rows += [[task, *(cells.get((task, length), "-") for length in lengths)] for task in tasks]
    if len(tasks) > 1 and lengths:
        means = [_mean([score for score in scores if score.length == length]) for length in lengths]
        rows.append(["mean", *(f"{100 * mean:.1f}" for mean in means)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def _mean(scores: Sequence[Score]) -> float:
    return sum(score.accuracy for score in scores) / len(scores)
