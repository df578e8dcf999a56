"""What is sent: conversations of one turn or several, drawn from a seed.

    random          prompts of a length, with nothing in common
    shared-prefix   groups of prompts that begin alike, in random order
    multi-turn      agents: one system prompt for all, a task, then turn by turn the server's own answer, a tool call
                    that stands for it, and the tool's result. What a prefix cache holds, it can use.
    file            glm5/bench/serve/files.py

The same seed and the same number of clients give the same prompts, whatever else a sweep runs; other numbers of
clients give others, so that no run profits from what the one before left in a cache.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from glm5.bench.serve.api_formats import Message, Prompt
from glm5.bench.serve.client import ReplyText
from glm5.bench.serve.texts import Source
from glm5.config.bench_serve import BenchServeConfig

TOOL: Message = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command and return what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass(frozen=True)
class Turn:
    """One request: what it adds to the conversation, and how many tokens it asks for."""

    content: Prompt
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Turns that are sent one after the other, each with everything before it."""

    turns: Sequence[Turn]
    tools: tuple[Message, ...] = ()


def generate(settings: BenchServeConfig, source: Source, num_requests: int, clients: int) -> list[Conversation]:
    """Conversations with `num_requests` turns in all, or a few more where they do not divide."""
    rng = np.random.default_rng([settings.seed, clients])
    match settings.dataset_name:
        case "shared-prefix":
            return _shared_prefix(settings, source, rng, num_requests)
        case "multi-turn":
            num = math.ceil(num_requests / settings.multi_turn_num_turns)
            build = _agent if settings.is_chat else _dialogue
            system = source.draw(rng, settings.multi_turn_system_len)
            return [build(settings, source, rng, system) for _ in range(num)]
        case _:
            return [_random(settings, source, rng) for _ in range(num_requests)]


def extend(prompt: Prompt, said: ReplyText, following: Turn) -> Prompt:
    """The prompt of the next turn: everything so far, the answer, and what comes after it."""
    if isinstance(prompt, str):
        return prompt + said.text + cast("str", following.content)
    new = cast("list[Message]", following.content)
    answer: Message = {"role": "assistant", "content": said.text}
    if said.reasoning:
        answer["reasoning_content"] = said.reasoning
    if new[0]["role"] == "tool":  # the protocol wants the call that a result belongs to; models under load make none
        arguments = json.dumps({"command": "next"})
        call = {"id": new[0]["tool_call_id"], "type": "function", "function": {"name": "run", "arguments": arguments}}
        answer["tool_calls"] = [call]
    return [*cast("list[Message]", prompt), answer, *new]


def random_length(rng: np.random.Generator, mean: int, ratio: float) -> int:
    """A whole number drawn evenly from mean * (1 - ratio) to mean * (1 + ratio), as vLLM draws lengths."""
    return int(rng.integers(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio)), endpoint=True)) or 1


def _random(settings: BenchServeConfig, source: Source, rng: np.random.Generator) -> Conversation:
    ratio = settings.random_range_ratio
    num_tokens = random_length(rng, settings.random_input_len, ratio) - source.overhead
    content = source.draw(rng, max(1, num_tokens))
    return Conversation([Turn(content, random_length(rng, settings.random_output_len, ratio))])


def _shared_prefix(
    settings: BenchServeConfig, source: Source, rng: np.random.Generator, num_requests: int
) -> list[Conversation]:
    prefix_len = max(1, settings.prefix_repetition_prefix_len - source.overhead)
    prefixes = [source.draw(rng, prefix_len) for _ in range(settings.prefix_repetition_num_prefixes)]
    conversations: list[Conversation] = []
    for number in rng.permutation(num_requests).tolist():
        prefix: Any = prefixes[number % len(prefixes)]
        content = prefix + source.draw(rng, settings.prefix_repetition_suffix_len)
        conversations.append(Conversation([Turn(content, settings.prefix_repetition_output_len)]))
    return conversations


def _agent(
    settings: BenchServeConfig, source: Source, rng: np.random.Generator, system: str | list[int]
) -> Conversation:
    ratio = settings.random_range_ratio
    task = source.draw(rng, random_length(rng, settings.random_input_len, ratio))
    new: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    turns: list[Turn] = []
    for number in range(settings.multi_turn_num_turns):
        turns.append(Turn(new, random_length(rng, settings.random_output_len, ratio)))
        result = source.draw(rng, random_length(rng, settings.multi_turn_result_len, ratio))
        new = [{"role": "tool", "tool_call_id": f"call_{number}", "content": result}]
    return Conversation(turns, (TOOL,))


def _dialogue(
    settings: BenchServeConfig, source: Source, rng: np.random.Generator, system: str | list[int]
) -> Conversation:
    """The same as one growing text, for routes without messages."""
    ratio = settings.random_range_ratio
    new: Any = system + cast("Any", source.draw(rng, random_length(rng, settings.random_input_len, ratio)))
    turns: list[Turn] = []
    for _ in range(settings.multi_turn_num_turns):
        turns.append(Turn(new, random_length(rng, settings.random_output_len, ratio)))
        new = source.draw(rng, random_length(rng, settings.multi_turn_result_len, ratio))
    return Conversation(turns)
