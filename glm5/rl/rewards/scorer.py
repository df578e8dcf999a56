"""An outcome reward model from a folder, which reads conversations by its own template and tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.resolve import resolve
from glm5.common.errors import DataError
from glm5.rl.environments.protocol import Message
from glm5.train.data.chat import conversation_ids
from glm5.train.reward_model import RewardModel


class FolderScorer:
    """The `RewardScorer` of a checkpoint. Raises CheckpointError and ConfigError."""

    def __init__(self, folder: str, device: torch.device) -> None:
        self._model, assets = RewardModel.load(folder, device), resolve(folder)
        self._template = ChatTemplate.for_checkpoint(assets, tokenizer=Tokenizer.from_dir(assets))

    def score(self, conversations: Sequence[tuple[Sequence[Message], Sequence[Mapping[str, Any]]]]) -> list[float]:
        """See `RewardScorer`."""
        return self._model.score([self._ids(*one) for one in conversations])

    def _ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation; of texts alone, where what the policy said is no conversation otherwise."""
        try:
            return conversation_ids({"messages": [dict(one) for one in messages], "tools": list(tools)}, self._template)
        except DataError:
            # A reply may begin with <think> in its text, which supervised data must not.
            told = [(one["role"], str(one.get("content") or "").replace("<think>", "think")) for one in messages]
            texts = [{"role": role, "content": content} for role, content in told]
            return conversation_ids({"messages": texts}, self._template)
