"""Texts of the demo to measure quantization on: held-out questions of all kinds in turn, calibration from training."""

from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.demo.run import TEMPLATE
from glm5.quantize.ladder import Example, Texts
from glm5.train.data.dialogues import example
from glm5.train.data.questions import KINDS, Split, conversation

CALIBRATION_SEED = 10_000  # far from the seeds that models are trained with


def texts_of(model: Path, num_questions: int, num_samples: int) -> Texts:
    """For a checkpoint of `glm5 demo`, whose tokenizer they are for."""
    template = ChatTemplate.bundled(TEMPLATE, Tokenizer.from_dir(model))

    def calibration(seed: int) -> Sequence[Sequence[int]]:
        return [each.ids for each in _examples(template, "train", CALIBRATION_SEED + seed, num_samples)]

    return Texts(_examples(template, "held-out", 0, num_questions), calibration)


def _examples(template: ChatTemplate, split: Split, seed: int, number: int) -> list[Example]:
    in_turn = ((kind, index) for index in count() for kind in KINDS)
    made = (example(template, conversation(kind, split, seed, index)) for kind, index in in_turn)
    return [Example(each.ids, each.labelled) for each in islice(made, number)]
