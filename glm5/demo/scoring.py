"""Accuracy on held-out questions, in batches, through the engine and the parser that the server uses.

Right means all of it: the exact answer; for "think" after a thought; for "tool" one call of the right function with
the right arguments, and then the right answer to its result.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from glm5.chat.events import Parsed
from glm5.chat.parser import parse_ids
from glm5.chat.template import ChatTemplate
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.train.data.dialogues import messages
from glm5.train.data.questions import KINDS, Conversation, conversation

NUM_QUESTIONS = 200
MAX_TOKENS = 64


@dataclass(frozen=True)
class Score:
    """Questions of one kind answered right, and how fast all answers came."""

    num_right: int
    num_questions: int
    num_tokens: int
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_questions


def score(llm: LLM, template: ChatTemplate, kind: str, num_questions: int = NUM_QUESTIONS) -> Score:
    """Ask the first `num_questions` held-out questions of a kind, greedily."""
    chats = [conversation(kind, "held-out", 0, index) for index in range(num_questions)]
    start = time.monotonic()
    # What is asked: each question, and for one that ends in a tool call, its result too.
    questions = [messages(chat.turns)[:1] for chat in chats]
    answers, num_tokens = _answers(llm, template, chats, questions)
    right = [_is_first_step(chat, answer) for chat, answer in zip(chats, answers, strict=True)]
    if chats[0].turns[0].call is not None:
        answers, more = _answers(llm, template, chats, [messages(chat.turns)[:-1] for chat in chats])
        num_tokens += more
        right = [
            step and answer.content == chat.turns[0].answer and not answer.tool_calls
            for step, chat, answer in zip(right, chats, answers, strict=True)
        ]
    return Score(sum(right), num_questions, num_tokens, time.monotonic() - start)


def score_all(llm: LLM, template: ChatTemplate) -> dict[str, Score]:
    """Every kind's score."""
    return {kind: score(llm, template, kind) for kind in KINDS}


def _answers(
    llm: LLM, template: ChatTemplate, chats: Sequence[Conversation], questions: Sequence[list[dict[str, object]]]
) -> tuple[list[Parsed], int]:
    assert llm.tokenizer is not None
    prompts = [
        template.encode(question, list(chat.tools) or None, enable_thinking=chat.thinking)
        for chat, question in zip(chats, questions, strict=True)
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
    token_ids = [output.outputs[0].token_ids for output in outputs]
    parsed = [
        parse_ids(llm.tokenizer, ids, list(chat.tools), reasoning=chat.thinking)
        for chat, ids in zip(chats, token_ids, strict=True)
    ]
    return parsed, sum(map(len, token_ids))


def _is_first_step(chat: Conversation, answer: Parsed) -> bool:
    turn = chat.turns[0]
    if turn.call is None:
        return answer.content == turn.answer and not answer.tool_calls and bool(answer.reasoning) == bool(turn.thought)
    if len(answer.tool_calls) != 1 or not answer.complete:
        return False
    call = answer.tool_calls[0]
    return call.name == turn.call.name and json.loads(call.arguments) == turn.call.arguments
