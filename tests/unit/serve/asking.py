"""Requests to a server under test, and what tests look at in the answers."""

import json
from typing import Any

import httpx

ASK = [{"role": "user", "content": "the answer is"}]


def events_of(text: str) -> list[str]:
    """The data of a stream's events; comments are no events."""
    lines = [line for line in text.split("\n") if line]
    assert text.endswith("\n\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


class RequestBuilder:
    """`whole` and `streamed` give a request's choices, in one piece or joined from chunks, by index."""

    def __init__(self, http: httpx.Client, path: str = "/v1/chat/completions", **always: Any):
        self.http, self.path, self.always = http, path, always

    def body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {**self.always, **fields}

    def answer(self, **fields: Any) -> dict[str, Any]:
        answer = self.http.post(self.path, json=self.body(fields))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, **fields: Any) -> dict[str, Any]:
        """The error of a request that is refused with 400, streaming or not."""
        reported = []
        for stream in (False, True):
            answer = self.http.post(self.path, json=self.body(fields) | {"stream": stream})
            assert answer.status_code == 400, answer.text
            reported.append(answer.json()["error"])
        assert reported[0] == reported[1]
        return reported[0]

    def chunks(self, **fields: Any) -> list[dict[str, Any]]:
        answer = self.http.post(self.path, json=self.body(fields) | {"stream": True})
        assert answer.status_code == 200, answer.text
        *events, done = events_of(answer.text)
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    def text(self, **fields: Any) -> str:
        """Of one answer: reasoning and content, or the text."""
        return text_of(self.answer(**fields)["choices"][0])


def text_of(choice: dict[str, Any]) -> str:
    message = choice.get("message")
    return choice["text"] if message is None else (message["reasoning"] or "") + (message["content"] or "")


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices of a stream of chat chunks, as clients build them."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"reasoning": "", "content": "", "calls": [], "logprobs": []})
            delta = part.get("delta", {"content": part.get("text", "")})
            choice["reasoning"] += delta.get("reasoning", "")
            choice["content"] += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    choice["calls"].append([call["function"]["name"], ""])
                choice["calls"][call["index"]][1] += call["function"]["arguments"]
            choice["logprobs"] += (part["logprobs"] or {}).get("content", ())
            choice["finish_reason"] = part["finish_reason"]
    return choices
