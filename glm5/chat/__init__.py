"""Messages to token ids and token ids to messages. No torch: usable on its own.

tokenizer = Tokenizer.from_dir(folder)
template = ChatTemplate.for_checkpoint(folder)
prompt_ids = template.encode(messages, tools)
"""

from glm5.chat.detokenizer import TextStream
from glm5.chat.message import normalize_messages, normalize_tools
from glm5.chat.special import GLM_TOKENS
from glm5.chat.template import BUNDLED, ChatTemplate, ends_in_reasoning
from glm5.chat.tokenizer import Tokenizer, train_bpe

__all__ = [
    "BUNDLED",
    "GLM_TOKENS",
    "ChatTemplate",
    "TextStream",
    "Tokenizer",
    "ends_in_reasoning",
    "normalize_messages",
    "normalize_tools",
    "train_bpe",
]
