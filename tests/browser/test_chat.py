"""What a person does on the chat page, and what the server then hears."""

import json

import pytest

from tests.browser.devtools import SHIFT
from tests.browser.scripted import DONE, Answer, Gate, delta, refusal, said, usage

pytestmark = pytest.mark.browser

ANSWER = ".assistant .markdown:not(.thinking *)"
ENDED = "!document.querySelector('#send').hidden && document.querySelector('.assistant')"
TOOLS = '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]'


def say(page, text="hi"):
    page.fill("#prompt", text)
    page.press("Enter")


def converse(page, script, *texts):
    """Say each text, and wait for the answer `re: TEXT`."""
    for text in texts:
        script.answers.append(said(f"re: {text}"))
        say(page, text)
        page.wait(f"document.querySelector('#messages').innerText.includes({json.dumps(f're: {text}')}) && {ENDED}")


def stored(page):
    return page.run("return Object.entries(localStorage).map(([name, text]) => JSON.parse(text))")


def sent(script):
    """Role and content of each message of the last request."""
    return [(message["role"], message.get("content")) for message in script.requests[-1]["messages"]]


def test_an_answer_as_it_streams(chat, script):
    thought, text, end = Gate(), Gate(), Gate()
    parts = [delta(reasoning_content="Hm, *well*."), thought, delta(content="Hello **you**"), text, delta("stop"), end]
    script.answers.append(Answer([*parts, usage(1200, 34, prompt_tokens_details={"cached_tokens": 1024}), DONE]))
    say(chat, "Who are you?")
    chat.wait("document.querySelector('.thinking summary')?.innerText === 'Thinking…'")
    assert not chat.has(".thinking[open]")
    assert (chat.has("#send[hidden]"), chat.has("#stop[hidden]")) == (True, False)
    thought.open()
    chat.wait(f"document.querySelector('{ANSWER}').innerText === 'Hello you'")
    assert chat.attribute(".assistant", "aria-busy") == "true"
    assert chat.text(".thinking summary").startswith("Thought for")
    chat.click(".thinking summary")
    chat.wait("document.querySelector('.thinking em')?.innerText === 'well'")
    text.open()
    end.open()
    chat.wait(ENDED)
    assert chat.has(".thinking[open]")
    figures = chat.text(".figures")
    assert figures.startswith("34 tokens · ")
    assert figures.endswith(" · prompt 1,200, 1,024 cached")
    assert "first token after" in figures
    assert chat.text("#context") == "1,234 of 4,096 tokens"
    request = script.requests[0]
    assert request["messages"] == [{"role": "user", "content": "Who are you?"}]
    assert (request["model"], request["stream"]) == ("glm-5-nano", True)
    assert request["stream_options"]["include_usage"] is True
    assert not {"temperature", "max_tokens", "seed", "tools", "chat_template_kwargs"} & request.keys()


def test_an_example_is_a_first_message(chat, script):
    script.answers.append(said("brackets"))
    example = chat.texts("#examples button")[1]
    chat.click("#examples li:nth-child(2) button")
    chat.wait(ENDED)
    assert sent(script) == [("user", example)]
    assert chat.has("#welcome[hidden]")


def test_empty_fields_show_the_servers_defaults(chat, script):
    names = ("temperature", "top_p", "max_tokens", "seed")
    chat.wait("document.querySelector('#set-temperature').placeholder")
    shown = [chat.attribute(f"#set-{name}", "placeholder") for name in names]
    assert shown == ["0.7", "1", "2048", "random"]


def test_speed_is_that_of_the_tokens_after_the_first(chat):
    body = """
    const { figuresText } = await import("/page/message.js");
    return figuresText({ tokens: 101, rate: 100 / 2.5, ttft: 0.25, prompt: 7 });"""
    assert chat.run(body) == "101 tokens · 40.0 tokens/s · first token after 250 ms · prompt 7"


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stopping_ends_the_request(chat, script, how):
    answer = Answer([delta(content="Half a"), Gate()])
    script.answers.append(answer)
    say(chat)
    chat.wait(f"document.querySelector('{ANSWER}')?.innerText === 'Half a'")
    chat.press("Escape") if how == "Escape" else chat.click("#stop")
    assert answer.left.wait(20)
    chat.wait(ENDED)
    assert chat.text(".notice") == "Stopped."
    converse(chat, script, "go on")
    assert sent(script) == [("user", "hi"), ("assistant", "Half a"), ("user", "go on")]


def test_enter_sends_and_shift_enter_does_not(chat, script):
    chat.fill("#prompt", "one")
    chat.press("Enter", SHIFT)
    chat.call("Input.insertText", {"text": "two"})
    assert script.requests == []
    script.answers.append(said("x"))
    chat.press("Enter")
    chat.wait(ENDED)
    assert sent(script) == [("user", "one\ntwo")]
    chat.fill("#prompt", "  ")
    chat.press("Enter")
    assert len(script.requests) == 1


def test_another_answer(chat, script):
    converse(chat, script, "a", "b")
    script.answers.append(said("better", "thought"))
    chat.click(".again")
    chat.wait(f"document.querySelectorAll('{ANSWER}')[1]?.innerText === 'better' && {ENDED}")
    assert sent(script) == [("user", "a"), ("assistant", "re: a"), ("user", "b")]
    converse(chat, script, "c")
    assert script.requests[-1]["messages"][3]["reasoning_content"] == "thought"


def test_other_words(chat, script):
    converse(chat, script, "a", "b")
    chat.run("document.querySelector('#prompt').focus()")
    chat.press("ArrowUp")
    assert chat.run("return document.activeElement.value") == "b"
    chat.press("Escape")
    assert chat.texts(".bubble") == ["a", "b"]
    chat.press("Enter")
    chat.fill(".edit-field", "b2")
    script.answers.append(said("re: b2"))
    chat.press("Enter")
    chat.wait(f"document.querySelectorAll('{ANSWER}')[1]?.innerText === 're: b2'")
    assert sent(script) == [("user", "a"), ("assistant", "re: a"), ("user", "b2")]
    assert chat.texts(".bubble") == ["a", "b2"]


def test_tools_and_their_results(chat, script):
    def call(index, name, *texts):
        first = {"index": index, "id": f"id-{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        more = [{"index": index, "function": {"arguments": text}} for text in texts]
        return [delta(tool_calls=[one]) for one in (first, *more)]

    part = Gate()
    parts = [*call(0, "look", '{"wo', 'rd": '), part, *call(0, "look", '"x"}')[1:], *call(1, "look")]
    script.answers.append(Answer([delta(reasoning="I look."), *parts, delta("tool_calls"), usage(1, 2), DONE]))
    chat.click("#settings-button")
    chat.fill("#set-tools", "[not json")
    assert chat.text("#tools-error").startswith("Tools: not JSON")
    chat.fill("#set-tools", TOOLS)
    assert chat.text("#tools-error") == ""
    say(chat)
    chat.wait("""document.querySelector('.call pre')?.innerText === '{"word": '""")
    assert chat.text(".call-name") == "look"
    part.open()
    chat.wait("document.querySelector('.results')")
    assert chat.texts(".call > pre") == ['{\n  "word": "x"\n}', "{}"]
    chat.fill(".call:nth-of-type(1) textarea", '{"found": "y"}')
    chat.fill(".call:nth-of-type(2) textarea", "nothing")
    script.answers.append(said("It is y."))
    chat.click(".results button")
    chat.wait(f"document.querySelectorAll('.assistant')[1]?.innerText.includes('It is y.') && {ENDED}")
    assert script.requests[0]["tools"] == json.loads(TOOLS)
    first, second, third = script.requests[1]["messages"][1:]
    assert first["reasoning_content"] == "I look."
    assert [one["function"]["arguments"] for one in first["tool_calls"]] == ['{"word": "x"}', "{}"]
    assert second == {"role": "tool", "tool_call_id": "id-0", "content": '{"found": "y"}'}
    assert third == {"role": "tool", "tool_call_id": "id-1", "content": "nothing"}
    assert chat.texts(".call-result pre") == ['{"found": "y"}', "nothing"]
    assert chat.texts(".results") == []


def test_settings_are_sent(chat, script):
    chat.click("#settings-button")
    values = {"system": "Be kind.", "temperature": "0.7", "top_p": "0.9", "max_tokens": "50", "seed": "abc"}
    for name, value in values.items():
        chat.fill(f"#set-{name}", value)
    chat.choose("#set-effort", "high")
    converse(chat, script, "a")
    request = script.requests[-1]
    # What is no number goes as it is: the server refuses it by name, the page does not guess.
    expected = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 50, "seed": "abc", "reasoning_effort": "high"}
    assert {name: request[name] for name in expected} == expected
    assert request["messages"][0] == {"role": "system", "content": "Be kind."}
    chat.click("#thinking")
    chat.choose("#model", "other")
    converse(chat, script, "b")
    request = script.requests[-1]
    assert (request["model"], request["chat_template_kwargs"]) == ("other", {"enable_thinking": False})
    assert "reasoning_effort" not in request
    # A new conversation starts with the settings of the one before; the defaults are a button away.
    chat.click("#new")
    converse(chat, script, "c")
    assert script.requests[-1]["messages"][0]["content"] == "Be kind."
    chat.click("#reset")
    converse(chat, script, "d")
    assert not {"temperature", "chat_template_kwargs", "seed"} & script.requests[-1].keys()
    assert sent(script)[0] == ("user", "c")
    assert script.requests[-1]["model"] == "other"


def test_refusals_are_shown_as_they_are(chat, script):
    message = "temperature is 9; allowed: 0 to 2 <b>really</b>"
    script.answers.append(Answer(refusal=refusal(400, message, param="temperature", code="bad_value")))
    say(chat)
    chat.wait("document.querySelector('.error')")
    assert chat.text(".error strong") == "400 · invalid_request_error · bad_value · field: temperature"
    assert chat.text(".error pre") == message
    assert chat.attribute(".error", "role") == "alert"
    busy = refusal(429, "the queue is full")
    busy.headers["Retry-After"] = "7"
    script.answers.append(Answer(refusal=busy))
    chat.click(".again")
    chat.wait("document.querySelector('.error strong')?.innerText.includes('try again in 7 s')")
    converse(chat, script, "once more")
    # What failed without a word is no part of the conversation.
    assert sent(script) == [("user", "hi"), ("user", "once more")]
    chat.problems.clear()


def test_conversations_are_kept_and_deleted(chat, script):
    converse(chat, script, "first", "more")
    chat.click("#new")
    converse(chat, script, "second")
    chat.open(chat.url)
    chat.wait("document.querySelectorAll('#chats li').length === 2")
    assert chat.texts("#chats .title") == ["second", "first"]
    assert chat.texts(".bubble") == []
    chat.click("#chats li:nth-child(2) .title")
    assert chat.texts(".bubble") == ["first", "more"]
    converse(chat, script, "yet more")
    assert [role for role, _ in sent(script)] == ["user", "assistant"] * 2 + ["user"]
    assert chat.texts("#chats .title") == ["first", "second"]
    chat.click("#chats .remove")
    assert len(stored(chat)) == 2
    chat.click("#chats .remove")
    assert [one["messages"][0]["content"] for one in stored(chat)] == ["second"]
    assert chat.texts(".bubble") == ["second"]


def test_an_answer_goes_on_while_another_conversation_is_shown(chat, script):
    gate = Gate()
    script.answers.append(Answer([delta(content="slow"), gate, delta("stop", content=" done"), usage(1, 2), DONE]))
    say(chat, "first")
    chat.wait(f"document.querySelector('{ANSWER}')?.innerText === 'slow'")
    chat.click("#new")
    converse(chat, script, "second")
    assert chat.texts("#chats .running") == ["first"]
    gate.open()
    chat.wait("!document.querySelector('#chats .running')")
    chat.click("#chats li:nth-child(2) .title")
    assert chat.texts(ANSWER) == ["slow done"]


def test_an_answer_is_kept_when_the_tab_goes(chat, script):
    script.answers.append(Answer([delta(content="so far"), Gate()]))
    say(chat)
    chat.wait(f"document.querySelector('{ANSWER}')?.innerText === 'so far'")
    chat.open(f"{chat.url}/dashboard?gone")
    assert stored(chat)[0]["messages"][1]["content"] == "so far"
    chat.problems.clear()


def test_damaged_and_full_storage(page, script):
    page.open(page.url)
    for name, text in {"glm5.chat.x": "{oops", "glm5.chat.y": "3", "z": "w"}.items():
        page.run("localStorage.setItem(a, b)", name, text)
    page.open(page.url)
    page.wait("document.querySelector('#model').value")
    assert page.texts("#chats li") == []
    page.run("localStorage.setItem('fill', 'x'.repeat(5 * 2 ** 20 - 500))")
    script.answers.append(said("long " * 200))
    say(page)
    page.wait(f"{ENDED} && document.querySelector('#warning .error')")
    assert "not saved" in page.text("#warning")
    assert page.text(ANSWER).startswith("long long")


def test_the_key_is_asked_for_and_stays_in_the_tab(page, script):
    script.needed_key = "secret"
    page.open(page.url)
    page.wait("document.querySelector('#warning .error')")
    assert page.text("#warning") == "401 · invalid_request_error · invalid_api_key: a valid API key is needed"
    assert page.run("return document.activeElement.id") == "set-key"
    page.fill("#set-key", "secret")
    page.press("Enter")
    page.run("document.activeElement.blur()")
    page.wait("document.querySelector('#model').value && !document.querySelector('#warning .error')")
    assert script.keys[-1] == "Bearer secret"
    assert page.run("return JSON.stringify({ ...localStorage })").find("secret") == -1
    assert page.run("return sessionStorage.getItem('glm5.key')") == "secret"
    page.problems.clear()


def test_copying(chat, script, browser):
    browser.call("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    text = "Some **text**\n\n```js\nlet a = 1;\n```"
    script.answers.append(said(text))
    say(chat)
    chat.wait(ENDED)
    # The clipboard belongs to the page that has the focus; the test looks at what the page asks for.
    chat.run("window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text); }")
    chat.click(".assistant .actions button")
    chat.click(".code-bar button")
    chat.wait("window.copied.length === 2")
    assert chat.run("return window.copied") == [text, "let a = 1;"]
    chat.wait("document.querySelector('.code-bar button').getAttribute('aria-label') === 'Copied'")


def test_a_reader_who_scrolled_up_stays_there(chat, script):
    gate, end = Gate(), Gate()
    parts = [delta(content="line\n\n" * 80), gate, delta(content="new\n\n" * 20), end, delta("stop"), DONE]
    script.answers.append(Answer(parts))
    say(chat)
    chat.wait("document.querySelectorAll('.assistant p').length === 80")
    chat.wait("document.querySelector('#to-end').hidden")
    chat.run("document.querySelector('#log').scrollTop = 100")
    chat.wait("!document.querySelector('#to-end').hidden")
    gate.open()
    chat.wait("document.querySelectorAll('.assistant p').length === 100")
    end.open()
    chat.wait(ENDED)
    assert chat.run("return document.querySelector('#log').scrollTop") == 100
    chat.click("#to-end")
    chat.wait("document.querySelector('#to-end').hidden")


def test_screen_readers_hear_paragraphs_and_the_end(chat, script):
    gate = Gate()
    script.answers.append(Answer([delta(content="One.\n\nTw"), gate, delta("stop", content="o."), usage(1, 2), DONE]))
    say(chat)
    chat.wait("document.querySelector('#live').textContent === 'One.'")
    gate.open()
    chat.wait("document.querySelector('#live').textContent.trim() === 'Two. End of the answer.'")
