"""The outcome reward model: a scalar r of a whole conversation, read from the value head at its last token.

    P(chosen is better than rejected) = sigmoid(score(chosen) - score(rejected)),     score = r / temperature

A stage of kind `reward` trains it (Bradley-Terry; docs/preferences.md). The temperature is fitted on held-out pairs and
lies beside the weights in reward.json.
"""

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Self

import torch
from pydantic import Field, ValidationError

from glm5.checkpoint.load import load
from glm5.checkpoint.resolve import resolve
from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import CheckpointError, ConfigError
from glm5.config.step import Positive, Section
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView, Stage

FILE = "reward.json"
PASS_TOKENS = 16_384


class Calibration(Section):
    """What reward.json says of a checkpoint."""

    keys: Stage = "sparse"
    """What attention read in training."""
    temperature: Positive = 1.0
    """By which differences of rewards are divided to be log-odds."""
    num_pairs: int = Field(default=0, ge=0)
    """Held-out pairs that it was fitted on; 0: none, and the temperature is 1."""


class RewardModel:
    """A trained reward model. Its scores have no zero: only differences between answers to one prompt mean anything."""

    def __init__(self, model: Glm5, calibration: Calibration, pass_tokens: int = PASS_TOKENS) -> None:
        """`pass_tokens`: of a forward pass at most, unless a single sequence is longer."""
        self.model, self.calibration, self._pass_tokens = model, calibration, pass_tokens

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> Self:
        """Of a checkpoint that a stage of kind `reward` wrote. Raises CheckpointError for one without a value head."""
        directory = resolve(folder)
        model = load(directory, device=device)
        if model.value_head is None:
            raise CheckpointError(
                f"{directory} has no value head, so it is no reward model; a stage of kind reward of `glm5 train` "
                "makes one from pairs of answers"
            )
        return cls(model, read_calibration(directory))

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """A score for each sequence of token ids, which is a conversation rendered as in training (`conversation_ids`
        of train/data/chat.py): log-odds after calibration. The same call gives the same numbers; the company of other
        sequences changes them by rounding alone. Raises ConfigError for an empty sequence or an unknown id,
        CheckpointError for a score that is not finite."""
        largest = self.model.cfg.vocab_size - 1
        for i, ids in enumerate(sequences):
            if not ids or min(ids) < 0 or max(ids) > largest:
                raise ConfigError(f"sequence {i} to score: allowed are one or more token ids in 0..{largest}")
        scores = [0.0] * len(sequences)
        for indices in self._passes([len(ids) for ids in sequences]):
            lengths = [len(sequences[i]) for i in indices]
            ids_T = torch.tensor([one for i in indices for one in sequences[i]], device=self.model.device)
            reward_B = last_rewards(self.model, self.model(ids_T, self._view(lengths)), lengths)
            for i, reward in zip(indices, reward_B.tolist(), strict=True):
                scores[i] = reward / self.calibration.temperature
        if not all(map(isfinite, scores)):
            raise CheckpointError("a score of the reward model is not finite: its checkpoint is damaged")
        return scores

    def _view(self, lengths: list[int]) -> PackedView:
        return PackedView(lengths, self.model.device, stage=self.calibration.keys)

    def _passes(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of the sequences of each pass, the shortest first."""
        passes: list[list[int]] = []
        total = 0
        for i in sorted(range(len(lengths)), key=lengths.__getitem__):
            if not passes or total + lengths[i] > self._pass_tokens:
                passes.append([])
                total = 0
            passes[-1].append(i)
            total += lengths[i]
        return passes


def last_rewards(model: Glm5, hidden_TD: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The value head at the last token of each of the packed sequences, [B] in float32 or wider."""
    assert model.value_head is not None
    last_B = torch.tensor(lengths).cumsum(0).to(hidden_TD.device, non_blocking=True) - 1
    dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
    return hidden_TD[last_B].to(dtype) @ model.value_head.weight[0].to(dtype)


def read_calibration(folder: Path) -> Calibration:
    """That of a checkpoint; the default where its folder has none. Raises CheckpointError."""
    file = folder / FILE
    if not file.is_file():
        return Calibration()
    try:
        return Calibration.model_validate(json.loads(read_bounded_text(file, SETTINGS)))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{file} is damaged: {reason}; write the checkpoint again") from None
