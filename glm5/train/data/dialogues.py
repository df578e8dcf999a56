"""Generated conversations as token ids, with the assistant's tokens marked for the loss."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from glm5.chat.special import GLM_TOKENS
from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer, train_bpe
from glm5.train.data.questions import KINDS, Conversation, Turn, conversation

NEXT_TURN = "<|user|>"  # the token that ends an answer
CORPUS_PER_KIND = 100
# Letters and digits stay one token each if the tokenizer is not trained on sequences of them.
_NOT_IN_CORPUS = re.compile("|".join(map(re.escape, GLM_TOKENS)) + r"|[A-Z]{2,}|\d")


@dataclass(frozen=True)
class Example:
    """Token ids, and for each whether it counts in the loss."""

    ids: tuple[int, ...]
    labelled: tuple[bool, ...]


def messages(turns: tuple[Turn, ...]) -> list[dict[str, Any]]:
    """The turns as OpenAI messages."""
    listed: list[dict[str, Any]] = []
    for i, turn in enumerate(turns):
        listed.append({"role": "user", "content": turn.user})
        thought = {"reasoning_content": turn.thought} if turn.thought else {}
        if turn.call is not None:
            function = {"name": turn.call.name, "arguments": turn.call.arguments}
            call = {"id": f"call_{i}", "type": "function", "function": function}
            listed.append({"role": "assistant", "tool_calls": [call], **thought})
            listed.append({"role": "tool", "tool_call_id": call["id"], "content": turn.call.result})
            thought = {}
        listed.append({"role": "assistant", "content": turn.answer, **thought})
    return listed


def example(template: ChatTemplate, chat: Conversation) -> Example:
    """A conversation as the template renders it. Labelled are the tokens after each generation prompt, including the
    one that ends the turn."""
    tokenizer, guard = template.tokenizer, template.guard()
    assert tokenizer is not None
    tools, switch = list(chat.tools) or None, {"enable_thinking": chat.thinking}
    text = template.render_marked(guard, messages(chat.turns), tools, add_generation_prompt=False, **switch)
    ids = guard.encode(text + NEXT_TURN)
    opening = ("<|assistant|>", "<think>") if chat.thinking else ("<|assistant|>", "<think>", "</think>")
    opening_ids = [tokenizer.id_of(tag) for tag in opening]
    labelled: list[bool] = []
    speaks = False
    for i, token_id in enumerate(ids):
        labelled.append(speaks)
        opened = ids[max(0, i + 1 - len(opening)) : i + 1] == opening_ids
        speaks = token_id not in tokenizer.eos_ids if speaks else opened
    return Example(tuple(ids), tuple(labelled))


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer for which each word of the questions is one token, and each spelled letter and each digit too."""
    return train_bpe(corpus(), vocab_size)


def corpus() -> Iterator[str]:
    """Training text for a tokenizer of these conversations."""
    template = ChatTemplate.bundled("glm-5.2")
    for kind in KINDS:
        for i in range(CORPUS_PER_KIND):
            chat = conversation(kind, "train", 0, i)
            text = template.render(
                messages(chat.turns),
                list(chat.tools) or None,
                add_generation_prompt=False,
                enable_thinking=chat.thinking,
            )
            yield from _NOT_IN_CORPUS.split(text)
