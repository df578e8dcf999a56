"""An outcome reward model from a folder, which reads conversations by its own template and tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.resolve import resolve
from glm5.rl.environments.protocol import Message
from glm5.rl.rollouts.chat import TokenChat
from glm5.train.reward_model import RewardModel


class FolderScorer:
    """The `RewardScorer` of a checkpoint. Raises CheckpointError and ConfigError."""

    def __init__(self, folder: str, device: torch.device) -> None:
        self._model, assets = RewardModel.load(folder, device), resolve(folder)
        template = ChatTemplate.for_checkpoint(assets, tokenizer=Tokenizer.from_dir(assets))
        self._chat = TokenChat(template)

    def score(self, conversations: Sequence[tuple[Sequence[Message], Sequence[Mapping[str, Any]]]]) -> list[float]:
        """See `RewardScorer`."""
        return self._model.score([self._chat.conversation(*one)[0] for one in conversations])
