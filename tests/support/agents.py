"""Agents that talk to a server in three dialects, with the habits of real clients, and a random engine.

A client keeps its history as its dialect has it: it may leave reasoning out, write arguments anew, trim texts, ask
again, edit what was said, compact its history, begin a conversation of its own within the session, or leave early.
"""

import json
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random
from typing import Any

import httpx

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.frontend.outputs import Delta, Logprob, Piece
from tests.support.engines import ScriptedEngine
from tests.support.tokenizers import tiny_tokenizer

TOOL = {
    "name": "run",
    "description": "Run a command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}},
}
WORDS = ["alpha", "weather in Paris", "the answer", "Berlin", "{x: 1}", "ünï", "a  b", "\n\n", "ok.", "<|user|>", "7"]
DIALECTS = ("chat", "anthropic", "responses", "completions")


class RandomEngine(ScriptedEngine):
    """Answers each request at random, in tokens that no tokenizer would choose, and notes what it was asked and said.

    `said`: (prompt, tokens, log-probabilities, versions) of every answer that was sampled to its end.
    """

    max_model_len = 1 << 20

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(tokenizer)
        self.random, self.version = Random(seed), 0
        self.said: list[tuple[list[int], list[int], list[float], list[int]]] = []

    @asynccontextmanager
    async def generate(self, prompt_ids, params, *, request_id=None, **options):
        assert params.logprobs is not None, "log-probabilities were not asked for"
        self.options = options
        yield self._answer(list(prompt_ids))

    async def _answer(self, prompt: list[int]):
        draw, tokenizer = self.random, self.tokenizer
        ids = [token for part in self._parts() for token in self._odd(part)]
        ids.append(draw.choice(sorted(tokenizer.eos_ids)))
        logprobs = [-draw.expovariate(1.0) for _ in ids]
        versions: list[int] = []
        stream, place = tokenizer.stream(), 0
        while place < len(ids):
            if draw.random() < 0.05:
                self.version += 1  # weights change within an answer
            count = draw.randint(1, 9)
            step = ids[place : place + count]
            versions += [self.version] * len(step)
            shown = [one for one in step if one not in tokenizer.eos_ids]
            pieces = tuple(Piece(one, stream.feed(one)) for one in shown)
            is_last = place + count >= len(ids)
            tempered = tuple(logprobs[place : place + count])
            rows = tuple({one: Logprob(value, 1, None, value)} for one, value in zip(step, tempered, strict=True))
            if is_last:  # before it is sent: the client may ask again at once
                self.said.append((prompt, ids, logprobs, versions))
            yield Delta(
                tuple(step),
                pieces,
                "stop" if is_last else None,
                logprobs=rows,
                version=self.version,
                tempered_logprobs=tempered,
                arrived=time.monotonic(),
            )
            place += count

    def _parts(self) -> list[str]:
        """Reasoning, text and calls as the model writes them."""
        draw = self.random
        parts = [self._text(), "</think>"] if draw.random() < 0.8 else ["</think>"]
        if draw.random() < 0.8:
            parts.append(self._text())
        for _ in range(draw.choice([0, 0, 1, 1, 2, 3])):
            value = json.dumps(draw.randint(0, 9))
            parts += ["<tool_call>", "run", "<arg_key>", "command", "</arg_key>", "<arg_value>", self._text() or "ls"]
            parts += [
                "</arg_value>",
                "<arg_key>",
                "n",
                "</arg_key>",
                "<arg_value>",
                value,
                "</arg_value>",
                "</tool_call>",
            ]
        return parts if len(parts) > 1 else [*parts, "done"]

    def _text(self) -> str:
        draw = self.random
        return (
            draw.choice(["", " ", "\n"]) + " ".join(draw.choices(WORDS, k=draw.randint(0, 5))) + draw.choice(["", " "])
        )

    def _odd(self, text: str) -> list[int]:
        """Tokens of a text that was cut at random before it was tokenized."""
        if self.tokenizer.id_of(text) is not None:
            return [self.tokenizer.id_of(text)]
        cuts = sorted(self.random.sample(range(len(text) + 1), min(len(text), self.random.randint(0, 3))))
        edges = [0, *cuts, len(text)]
        parts = [text[first:last] for first, last in pairwise(edges)]
        return [token for part in parts for token in self.tokenizer.encode(part, allow_special=False)]


class Agent:
    """A client of one dialect in one session. `ask` sends its history; what it does between is drawn."""

    def __init__(self, client: httpx.Client, name: str, dialect: str, random: Random, *, by_path: bool) -> None:
        self.client, self.dialect, self.random = client, dialect, random
        self.prefix = f"/sessions/{name}" if by_path else ""
        self.headers = {} if by_path else {"X-Session-ID": name}
        self.system = f"You are agent {name}."
        self.history: list[dict[str, Any]] = [self._user("begin")]
        self.keeps_reasoning = random.random() < 0.5
        self.trims = random.random() < 0.5
        self.num_branches = 0  # that it has begun, of which each may be a fork

    def run(self, turns: int) -> None:
        for _ in range(turns):
            habit = self.random.random()
            if habit < 0.05:
                self.ask()  # asked again, as after a lost response: the first answer is thrown away
            elif habit < 0.1 and len(self.history) > 3:
                self._edit()
            elif habit < 0.13 and len(self.history) > 3:
                self.history = [self._user("summary: " + self.random.choice(WORDS))]
                self.num_branches += 1
            elif habit < 0.16:
                self._leave()
            self.history += self._read(self.ask())
            if habit > 0.95:
                kept, self.history = self.history, [self._user(f"sub-agent {self.random.random()}")]
                self.num_branches += 1
                self.history += self._read(self.ask())
                self.history = kept

    def ask(self) -> dict[str, Any]:
        path, body = self._request()
        stream = self.random.random() < 0.4
        response = self.client.post(self.prefix + path, json=body | {"stream": stream}, headers=self.headers)
        assert response.status_code == 200, response.text
        return self._from_stream(response.text) if stream else response.json()

    def _leave(self) -> None:
        """Disconnect in the middle of an answer."""
        path, body = self._request()
        with self.client.stream(
            "POST", self.prefix + path, json=body | {"stream": True}, headers=self.headers
        ) as response:
            next(response.iter_raw(), None)

    def _edit(self) -> None:
        """Say something else in the place of an earlier reply."""
        places = [i for i, one in enumerate(self.history) if self._is_plain_reply(one)]
        if not places:
            return
        place = self.random.choice(places)
        self.history = [*self.history[:place], self._said(f"edited {self.random.random()}"), self._user("go on")]
        self.num_branches += 1

    def _user(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def _said(self, text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    def _is_plain_reply(self, one: dict[str, Any]) -> bool:
        return one.get("role") == "assistant" and isinstance(one.get("content"), str) and not one.get("tool_calls")

    def _request(self) -> tuple[str, dict[str, Any]]:
        given = {"model": "tiny", "temperature": 1.0}
        if self.dialect == "chat":
            system = [{"role": "system", "content": self.system}]
            tools = [{"type": "function", "function": TOOL}]
            return "/v1/chat/completions", given | {"messages": system + self.history, "tools": tools}
        if self.dialect == "anthropic":
            tools = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
            more = {"system": self.system, "max_tokens": 4096, "thinking": {"type": "enabled", "budget_tokens": 2048}}
            return "/v1/messages", given | more | {"messages": self.history, "tools": tools}
        if self.dialect == "completions":
            prompt = [self.system, *(one["content"] for one in self.history)]
            if self.keeps_tokens:
                prompt = [token for part in prompt for token in (self._ids(part) if isinstance(part, str) else part)]
            else:
                prompt = "".join(prompt)
            return "/v1/completions", given | {"prompt": prompt, "max_tokens": 4096, "return_token_ids": True}
        more = {"instructions": self.system, "input": self.history, "store": False}
        return "/v1/responses", given | more | {"tools": [{"type": "function", **TOOL}]}

    def _read(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """A reply as this client keeps it, and what comes after it."""
        return getattr(self, f"_read_{self.dialect}")(answer)

    def _text(self, text: str) -> str:
        return text.strip() if self.trims else text

    def _arguments(self, arguments: str) -> str:
        """Written anew: other white space, other order."""
        values = json.loads(arguments)
        names = sorted(values, reverse=self.random.random() < 0.5)
        return json.dumps({name: values[name] for name in names}, indent=self.random.choice([None, 2]))

    def _read_chat(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        message = answer["choices"][0]["message"]
        kept: dict[str, Any] = {"role": "assistant", "content": self._text(message.get("content") or "")}
        if self.keeps_reasoning and message.get("reasoning_content"):
            kept["reasoning_content"] = message["reasoning_content"]
        calls = message.get("tool_calls") or []
        if not calls:
            return [kept, self._user(f"go on {self.random.random()}")]
        kept["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": self._arguments(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self.random.choice(WORDS)} for call in calls]
        return [kept, *results]

    def _read_anthropic(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        blocks = [
            block
            for block in answer["content"]
            if block["type"] != "thinking" or (self.keeps_reasoning and block["thinking"])
        ]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        kept = {"role": "assistant", "content": blocks or [{"type": "text", "text": ""}]}
        if not calls:
            return [kept, self._user(f"go on {self.random.random()}")]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": self.random.choice(WORDS)} for call in calls
        ]
        return [kept, {"role": "user", "content": results}]

    def _read_completions(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Tokens as they came; or text, which has no end of the reply, so that going on begins a branch."""
        (choice,) = answer["choices"]
        self.num_branches += not self.keeps_tokens
        said = choice["token_ids" if self.keeps_tokens else "text"]
        return [{"role": "assistant", "content": said}, self._user(f"go on {self.random.random()}")]

    @property
    def keeps_tokens(self) -> bool:
        return self.keeps_reasoning

    def _ids(self, text: str) -> list[int]:
        return tiny_tokenizer().encode(text)

    def _read_responses(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        for item in answer["output"]:
            if item["type"] == "reasoning" and not self.keeps_reasoning:
                continue
            if item["type"] == "function_call":
                calls.append(item)
                item = item | {"arguments": self._arguments(item["arguments"])}
            kept.append(item)
        self.num_branches += not kept  # nothing of the reply is left in the history
        if not calls:
            return [*kept, self._user(f"go on {self.random.random()}")]
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": self.random.choice(WORDS)}
            for call in calls
        ]
        return [*kept, *results]

    def _from_stream(self, text: str) -> dict[str, Any]:
        """The complete answer of a stream."""
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return getattr(self, f"_joined_{self.dialect}")(events)

    def _joined_chat(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        for event in events:
            for choice in event["choices"]:
                delta = choice["delta"]
                for name in ("content", "reasoning_content"):
                    message[name] += delta.get(name) or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(message["tool_calls"]):
                        message["tool_calls"].append({"id": call["id"], "function": {"name": "", "arguments": ""}})
                    function = message["tool_calls"][call["index"]]["function"]
                    function["name"] += call["function"].get("name") or ""
                    function["arguments"] += call["function"].get("arguments") or ""
        return {"choices": [{"message": message}]}

    def _joined_completions(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(one["text"] for one in choices)
        return {"choices": [{"text": text, "token_ids": [token for one in choices for token in one["token_ids"]]}]}

    def _joined_anthropic(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]) | {"json": ""})
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[-1]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        block["json"] += delta["partial_json"]
        for block in blocks:
            given = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(given or "{}")
        return {"content": blocks}

    def _joined_responses(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        return next(event["response"] for event in events if event["type"] == "response.completed")
