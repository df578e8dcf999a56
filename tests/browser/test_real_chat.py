"""The chat page before the real application, whose engine is scripted."""

import json
import re

import pytest

from tests.browser.real import application
from tests.browser.scripted import EMPTY
from tests.support.engines import ScriptedEngine
from tests.support.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.browser

FUNCTION = {"name": "weather", "parameters": {"properties": {"days": {"type": "integer"}}}}
TOOLS = json.dumps([{"type": "function", "function": FUNCTION}])
ENDED = "document.querySelector('#stop').hidden"
CALL = "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><|observation|>"


@pytest.fixture(scope="module")
def scripted_engine():
    engine = ScriptedEngine(tiny_tokenizer())
    with application(engine) as engine.url:
        yield engine


@pytest.fixture
def chat(page, scripted_engine):
    page.forget(scripted_engine.url + EMPTY)
    scripted_engine.__init__(scripted_engine.tokenizer)
    page.open(scripted_engine.url)
    page.wait("document.querySelector('#model').value === 'tiny'")
    return page


def ask(page, text):
    page.wait(ENDED)
    page.fill("#prompt", text)
    page.press("Enter")


def test_reasoning_text_figures_and_context(chat, scripted_engine):
    scripted_engine.script = "I think</think>the **answer**<|user|>"
    ask(chat, "the question?")
    chat.wait(f"document.querySelector('.assistant .figures')?.innerText && {ENDED}")
    assert chat.texts(".assistant .markdown:not(.thinking *)") == ["the answer"]
    assert chat.has(".thinking:not([open])")
    # How long it took is not for a test to say.
    assert re.fullmatch(r"Thought( for .+)? · \d tokens", chat.text(".thinking summary"))
    num_prompt = len(scripted_engine.prompt_ids)
    num_tokens = len(scripted_engine.tokenizer.encode(scripted_engine.script))
    assert chat.text(".figures").startswith(f"{num_tokens} tokens · ")
    assert chat.text("#context") == f"{num_tokens + num_prompt} of 512 tokens"


def test_tools_over_two_turns(chat, scripted_engine):
    chat.click("#settings-button")
    chat.fill("#set-tools", TOOLS)
    scripted_engine.script = "let me see</think>" + CALL
    ask(chat, "the weather?")
    chat.wait("document.querySelector('.results')")
    assert chat.text(".call-name") == "weather"
    assert chat.text(".call > pre") == '{\n  "days": 3\n}'
    chat.fill(".call textarea", "fine")
    scripted_engine.script = "so</think>it is fine<|user|>"
    chat.click(".results button")
    chat.wait("document.querySelectorAll('.assistant')[1]?.innerText.includes('it is fine')")
    prompt = scripted_engine.tokenizer.decode(scripted_engine.prompt_ids)
    assert "<arg_value>3</arg_value>" in prompt
    assert "fine" in prompt.partition("<|observation|>")[2]


def test_settings_reach_the_engine_and_refusals_the_reader(chat, scripted_engine):
    chat.click("#settings-button")
    values = {"temperature": "0.5", "top_p": "0.25", "max_tokens": "7", "seed": "3", "system": "the rest"}
    for name, value in values.items():
        chat.fill(f"#set-{name}", value)
    chat.click("#thinking")
    scripted_engine.script = "the answer<|user|>"
    ask(chat, "the question?")
    chat.wait("document.querySelector('.assistant')?.innerText.includes('the answer')")
    params = scripted_engine.params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.25, 7, 3)
    prompt = scripted_engine.tokenizer.decode(scripted_engine.prompt_ids)
    assert "the rest" in prompt
    assert prompt.endswith("<|assistant|></think>")
    assert not chat.has(".thinking:not([hidden])")
    for field, value in {"temperature": "-1", "seed": "abc", "max_tokens": "9999"}.items():
        chat.fill(f"#set-{field}", value)
        ask(chat, "the question?")
        chat.wait("[...document.querySelectorAll('.assistant')].at(-1).querySelector('.error')")
        assert chat.texts(".error strong")[-1].startswith("400 · invalid_request_error")
        assert field in chat.texts(".error")[-1]
        chat.fill(f"#set-{field}", values[field])
    assert all("400" in problem for problem in chat.problems)
    chat.problems.clear()


def test_stopping_reaches_the_engine(chat, scripted_engine):
    scripted_engine.script, scripted_engine.hangs = "</think>the answer", True
    ask(chat, "the question?")
    chat.wait("document.querySelector('#stop').hidden === false")
    assert scripted_engine.started.wait(20)
    chat.press("Escape")
    assert scripted_engine.left.wait(20)
    chat.wait("document.querySelector('.notice')?.innerText === 'Stopped.'")
