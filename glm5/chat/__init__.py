"""Messages to token ids and token ids to messages. No torch: usable on its own."""

from glm5.chat.detokenizer import TextStream
from glm5.chat.special import GLM_TOKENS
from glm5.chat.tokenizer import Tokenizer, train_bpe

__all__ = ["GLM_TOKENS", "TextStream", "Tokenizer", "train_bpe"]
