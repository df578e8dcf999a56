"""Messages to token ids and token ids to messages. No torch: usable on its own.

tokenizer = Tokenizer.from_dir(folder)
template = ChatTemplate.for_checkpoint(folder, tokenizer=tokenizer)
prompt_ids = template.encode(messages, tools)
parser = OutputParser(tokenizer, tools, reasoning=template.starts_in_reasoning(prompt_ids))
events = parser.feed(token_id, text) ... parser.finish(); answer = collect(events)
"""

from glm5.chat.detokenizer import TextStream
from glm5.chat.events import (
    ContentDelta,
    Event,
    Parsed,
    ParsedCall,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from glm5.chat.message import normalize_messages, normalize_tools
from glm5.chat.parser import OutputParser, parse_ids
from glm5.chat.special import GLM_TOKENS
from glm5.chat.template import BUNDLED, ChatTemplate, ends_in_reasoning
from glm5.chat.tokenizer import Tokenizer, train_bpe

__all__ = [
    "BUNDLED",
    "GLM_TOKENS",
    "ChatTemplate",
    "ContentDelta",
    "Event",
    "OutputParser",
    "Parsed",
    "ParsedCall",
    "ReasoningDelta",
    "TextStream",
    "Tokenizer",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "collect",
    "ends_in_reasoning",
    "normalize_messages",
    "normalize_tools",
    "parse_ids",
    "train_bpe",
]
