"""Workloads: conversations of one or several turns, drawn from a seed.

    random          independent prompts of a length
    shared-prefix   groups of prompts with a common prefix, in random order
    multi-turn      agents: a common system prompt and a task; every turn adds the server's answer, a made-up tool call
                    and its result. The server can use its prefix cache.
    file            glm5/bench/serve/files.py

Prompts depend on the seed and the number of clients only. Runs with other numbers of clients have other prompts, so
that no run benefits from the cache of an earlier one.
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
    """One request: the content that it adds to the conversation, and its maximum number of output tokens."""

    content: Prompt
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Turns that are sent one after the other, each with all earlier ones."""

    turns: Sequence[Turn]
    tools: tuple[Message, ...] = ()


def generate(settings: BenchServeConfig, source: Source, num_requests: int, clients: int) -> list[Conversation]:
    """Conversations with `num_requests` turns in total, rounded up to full conversations."""
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


def extend(prompt: Prompt, reply: ReplyText, following: Turn) -> Prompt:
    """The prompt of the next turn: the last prompt, its answer and the turn's content."""
    if isinstance(prompt, str):
        return prompt + reply.text + cast("str", following.content)
    new = cast("list[Message]", following.content)
    answer: Message = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        answer["reasoning_content"] = reply.reasoning
    if new[0]["role"] == "tool":  # a result needs its tool call, which random answers do not contain
        arguments = json.dumps({"command": "next"})
        call = {"id": new[0]["tool_call_id"], "type": "function", "function": {"name": "run", "arguments": arguments}}
        answer["tool_calls"] = [call]
    return [*cast("list[Message]", prompt), answer, *new]


def random_length(rng: np.random.Generator, mean: int, ratio: float) -> int:
    """A uniform integer from mean * (1 - ratio) to mean * (1 + ratio), as in vLLM."""
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
    """The same as `_agent`, as one growing text for routes without messages."""
    ratio = settings.random_range_ratio
    new: Any = system + cast("Any", source.draw(rng, random_length(rng, settings.random_input_len, ratio)))
    turns: list[Turn] = []
    for _ in range(settings.multi_turn_num_turns):
        turns.append(Turn(new, random_length(rng, settings.random_output_len, ratio)))
        new = source.draw(rng, random_length(rng, settings.multi_turn_result_len, ratio))
    return Conversation(turns)
