"""Thinking switched on, off, up and down, in the words of three APIs, for every model's template."""

import httpx
import pytest

from glm5.chat.template import BUNDLED, ChatTemplate
from glm5.common.errors import RequestError
from glm5.serve.app import create_app
from glm5.serve.generation.thinking import Thinking, template_kwargs
from glm5.serve.http.server import bind, serving
from tests.support.engines import ScriptedEngine
from tests.support.tokenizers import tiny_tokenizer
from tests.unit.serve.asking import ASK, RequestBuilder
from tests.unit.serve.conftest import CONFIG

TOKENIZER = tiny_tokenizer()
TEMPLATES = {name: ChatTemplate.bundled(name, TOKENIZER) for name in BUNDLED}
OFF = [
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs.thinking"),
    ({"thinking": {"type": "disabled"}}, "thinking"),
    ({"reasoning_effort": "none"}, "reasoning_effort"),
]
ENDS = {"glm-5": "</think>", "glm-5.1": "</think>", "glm-5.2": "<think></think>"}


def rendered(name, kwargs=None, thinking=None, effort=None):
    template = TEMPLATES[name]
    return template.render(ASK, **template_kwargs(template, kwargs or {}, thinking, effort))


@pytest.fixture(scope="module", params=BUNDLED)
def server(request):
    engine = ScriptedEngine(TOKENIZER)
    app = create_app(engine, TEMPLATES[request.param], TOKENIZER, CONFIG)
    with serving(app, engine, bind("127.0.0.1", 0)) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield request.param, engine, RequestBuilder(http, messages=ASK)


@pytest.mark.parametrize(("fields", "param"), OFF, ids=str)
def test_off(server, fields, param):
    name, engine, chat = server
    engine.script = "the answer<|user|>"
    if name == "glm-5.3":
        error = chat.refusal(**fields)
        assert error["param"] == param
        assert "this model always thinks" in error["message"]
        return
    message = chat.answer(**fields)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("the answer", None)
    assert TOKENIZER.decode(engine.prompt_ids).endswith(f"<|assistant|>{ENDS[name]}")


def test_on(server):
    _, engine, chat = server
    engine.script = "why</think>the answer<|user|>"
    for fields in ({}, {"thinking": {"type": "enabled"}}, {"reasoning_effort": "low"}):
        answer = chat.answer(**fields)
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("the answer", "why")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(TOKENIZER.encode("why"))
        hidden = chat.answer(**fields, include_reasoning=False)["choices"][0]["message"]
        assert (hidden["content"], hidden["reasoning"], hidden["reasoning_content"]) == ("the answer", None, None)


EFFORTS = {
    "glm-5": dict.fromkeys(("minimal", "low", "medium", "high", "xhigh", "max"), ""),
    "glm-5.2": {"minimal": "High", "low": "High", "medium": "High", "high": "High", "xhigh": "Max", "max": "Max"},
    "glm-5.3": {"minimal": "Low", "low": "Low", "medium": "High", "high": "High", "xhigh": "Max", "max": "Max"},
}


@pytest.mark.parametrize("name", EFFORTS)
def test_efforts(name):
    for effort, line in EFFORTS[name].items():
        prompt = rendered(name, effort=effort)
        assert (f"Reasoning Effort: {line}" in prompt) == bool(line)
        assert prompt.count("Reasoning Effort") == bool(line)
        assert prompt.endswith("<think>")
    if name != "glm-5":
        raw = rendered(name, {"reasoning_effort": "medium"})
        assert "Reasoning Effort: Max" in raw, "what goes to the template is the template's to read"


def test_what_contradicts_itself():
    template = TEMPLATES["glm-5.2"]
    off, on = Thinking(type="disabled"), Thinking(type="enabled")
    with pytest.raises(RequestError, match=r"enable_thinking and thinking contradict") as caught:
        template_kwargs(template, {"enable_thinking": True}, off, None)
    assert caught.value.param == "thinking"
    with pytest.raises(RequestError, match="thinking and reasoning_effort contradict"):
        template_kwargs(template, {}, on, "none")
    assert template_kwargs(template, {}, off, "none")["enable_thinking"] is False
    for given in (True, None):
        assert template_kwargs(template, {"add_generation_prompt": given}, None, None) == {}


HISTORY = [
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": "a1", "reasoning": "r1"},
    {"role": "user", "content": "u2"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r2",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "result"},
]


def test_thinking_between_calls_stays_and_of_earlier_turns_on_request(server):
    """Reasoning comes back under either name; a loop of tools keeps it, `clear_thinking` decides about the rest."""
    name, engine, chat = server
    engine.script = "</think>x<|user|>"

    def prompt(**fields):
        chat.answer(messages=HISTORY, **fields)
        return TOKENIZER.decode(engine.prompt_ids)

    assert "<think>r2</think><tool_call>f</tool_call>" in prompt()
    for kept in ({"chat_template_kwargs": {"clear_thinking": False}},
                 {"thinking": {"type": "enabled", "clear_thinking": False}}):  # fmt: skip
        assert "<think>r1</think>a1" in prompt(**kept)
    cleared = prompt(chat_template_kwargs={"clear_thinking": True})
    assert "r1" not in cleared
    assert "<think>r2</think>" in cleared
    assert ("r1" in prompt()) == (name == "glm-5.3")


def test_a_turn_is_continued(server):
    _, engine, chat = server
    engine.script = "lin<|user|>"

    def ends(message, **fields):
        chat.answer(messages=[*ASK, {"role": "assistant", **message}], continue_final_message=True, **fields)
        return TOKENIZER.decode(engine.prompt_ids)

    assert ends({"content": "Ber"}).endswith("</think>Ber")
    assert ends({"content": "Ber  "}).endswith("</think>Ber  ")
    assert ends({"content": "Ber", "reasoning": "why"}).endswith("<think>why</think>Ber")
    assert ends({"content": "", "reasoning": "wh"}).endswith("<think>wh")
    message = chat.answer(messages=[*ASK, {"role": "assistant", "content": "Ber"}], continue_final_message=True)[
        "choices"
    ][0]["message"]
    assert (message["content"], message["reasoning"]) == ("lin", None)
    for bad in ({"role": "assistant", "content": ""}, {"role": "user", "content": "x"}):
        error = chat.refusal(messages=[*ASK, bad], continue_final_message=True)
        assert error["param"] in ("messages", "continue_final_message")
