"""An outcome reward model from a folder, which reads conversations by its own template and tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.resolve import resolve
from glm5.common.errors import GlmError
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
        return self._model.score([self._ids(*one) for one in conversations])

    def _ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation; of texts alone, where it has calls of tools that are no calls."""
        try:
            return self._chat.conversation(messages, tools)[0]
        except GlmError:
            texts = [{"role": one["role"], "content": str(one.get("content") or "")} for one in messages]
            return self._chat.conversation(texts, tools)[0]
