"""A served checkpoint, asked a few held-out questions by the real `openai` client."""

from collections.abc import Callable, Iterable
from typing import Any

from glm5.common.extras import require
from glm5.train.data.dialogues import messages
from glm5.train.data.questions import KINDS, Conversation, conversation

MODEL_NAME = "nano"
NAMED = ("--served-model-name", MODEL_NAME)
"""Flags of the server."""
QUESTIONS_PER_KIND = 2
SHOWN_CHARACTERS = 70
_SECONDS = 60

Say = Callable[[str], None]


def show(url: str, say: Say, kinds: Iterable[str] = KINDS, questions_per_kind: int = QUESTIONS_PER_KIND) -> None:
    """Ask questions of these kinds at `url` and say what went to and fro, streaming."""
    client = require("openai", "demo").OpenAI(base_url=f"{url}/v1", api_key="none", timeout=_SECONDS)
    for kind in kinds:
        for index in range(questions_per_kind):
            chat = conversation(kind, "held-out", 1, index)
            say(f"{kind}, thinking {'on' if chat.thinking else 'off'}")
            _converse(client, chat, say)


def _converse(client: Any, chat: Conversation, say: Say) -> None:
    questions = messages(chat.turns)[:1]
    say(f"  user       {_shortened(questions[0]['content'])}")
    reply = _stream(client, chat, questions, say)
    if reply["tool_calls"] and chat.turns[0].call is not None:
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": chat.turns[0].call.result}
        say(f"  result     {result['content']}")
        _stream(client, chat, [*questions, reply, result], say)


def _stream(client: Any, chat: Conversation, questions: list[dict[str, Any]], say: Say) -> dict[str, Any]:
    """One answer, said as it is understood; returns it as a message."""
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=questions,
        tools=list(chat.tools) or None,
        temperature=0,
        stream=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": chat.thinking}},
    )
    reasoning, content, calls = "", "", {}
    for chunk in stream:
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        for part in delta.tool_calls or ():
            call = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": {"arguments": ""}})
            if part.function.name:
                call["function"]["name"] = part.function.name
            call["function"]["arguments"] += part.function.arguments or ""
    if reasoning:
        say(f"  thinking   {reasoning}")
    for call in calls.values():
        say(f"  calls      {call['function']['name']} {call['function']['arguments']}")
    if content:
        say(f"  assistant  {content}")
    return {"role": "assistant", "content": content, "tool_calls": list(calls.values()), "reasoning_content": reasoning}


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} ... ({len(text.split())} words) ... {text[-half:]}"
