"""Both pages fit a phone, work by keyboard, name their controls, and can be read in light and dark."""

from pathlib import Path

import pytest

from tests.browser.devtools import DESKTOP, SHIFT
from tests.browser.scripted import Answer, delta, said, usage

pytestmark = pytest.mark.browser

MIN_CONTRAST = 4.5  # WCAG 2.2, 1.4.3
MIN_TARGET = 24  # CSS pixels; WCAG 2.2, 2.5.8
PROBES = Path(__file__).with_name("probes.js").read_text(encoding="utf-8")
PHONE = (320, 568)  # CSS pixels, of the smallest in use
# What has no place to break.
ANSWER = f"""
# A title

Some `code`, a [link](https://example.org) and averyveryverylongwordthatnobodycouldbreak{"x" * 60}

```python
{"long line " * 20}
```

| a | b | c | d | e |
|---|---|---|---|---|
| wide cell | wide cell | wide cell | wide cell | wide cell |

> quote
"""
LONG_CALL = {"name": "a_tool_with_a_very_long_name_indeed", "arguments": '{"x": "' + "y" * 90 + '"}'}
CALL = [{"index": 0, "id": "c", "function": LONG_CALL}]
NAMED = {"button", "link", "textbox", "combobox", "image", "img", "region", "navigation", "complementary"}
METRICS = 'vllm:num_requests_running{model_name="m"} 3\n'


@pytest.fixture(scope="module")
def conversation(browser, server):
    """A page with everything that a conversation can show."""
    script, url = server
    script.__init__()
    with browser.page() as page:
        page.add_script(PROBES)
        page.open(url)
        page.wait("document.querySelector('#model').value")
        for text, answer, shown in [
            ("Say it " + "all " * 40, said(ANSWER, "A thought with **weight**."), ".thinking:not([hidden], .now)"),
            ("Call", Answer([delta(tool_calls=CALL), delta("tool_calls"), usage(1, 2)]), ".results"),
            ("Fail", Answer([delta(content="x")]), ".error"),
        ]:
            script.answers.append(answer)
            page.fill("#prompt", text)
            page.press("Enter")
            page.wait(f"document.querySelector('{shown}') && document.querySelector('#stop').hidden")
        page.click(".thinking summary")
        yield page
        assert not page.problems


@pytest.fixture
def filled(conversation):
    """The conversation on a desktop, no panel open but the list."""
    yield conversation
    conversation.resize(*DESKTOP)
    conversation.prefer("light")
    conversation.wait("document.querySelector('#settings').hidden || document.querySelector('#settings-close').click()")


@pytest.fixture
def dashboard(page, script):
    script.metrics = [METRICS]
    page.add_script(PROBES)
    page.open(f"{page.url}/dashboard")
    page.wait("document.querySelector('#status').textContent === 'Live'")
    return page


def unnamed(page) -> list[str]:
    """Controls that screen readers could only call by their kind."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    seen = [node for node in nodes if not node["ignored"] and node["role"]["value"] in NAMED]
    assert len(seen) > 5
    return [node["role"]["value"] for node in seen if not node.get("name", {}).get("value")]


def misfits(page) -> list[str]:
    return page.run("return misfits(a, b)", PHONE[0], MIN_TARGET)


def test_the_chat_fits_a_phone(filled):
    filled.resize(*PHONE, touch=True)
    filled.wait("document.querySelector('#sidebar').hidden")
    assert misfits(filled) == []
    for panel in ("sidebar", "settings"):
        filled.click(f"#{panel}-button")
        assert misfits(filled) == []
        filled.click(f"#{panel}-close")
    filled.run("document.querySelector('#composer').style.minWidth = '400px'")
    assert misfits(filled) != []
    filled.run("document.querySelector('#composer').style.minWidth = ''")


def test_the_dashboard_fits_a_phone(dashboard):
    dashboard.resize(*PHONE, touch=True)
    dashboard.wait("document.querySelector('.plot').viewBox.baseVal.width < 320")
    assert misfits(dashboard) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chat_can_be_read(filled, scheme):
    filled.prefer(scheme)
    filled.click("#settings-button")
    found = filled.run("return faint(a)", MIN_CONTRAST)
    assert found["count"] > 60
    assert found["wrong"] == []


def test_faint_text_is_noticed(filled):
    """The control."""
    filled.run("document.body.style.setProperty('--muted', '#999')")
    assert filled.run("return faint(a)", MIN_CONTRAST)["wrong"] != []
    filled.run("document.body.style.removeProperty('--muted')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_dashboard_can_be_read(dashboard, scheme):
    dashboard.prefer(scheme)
    found = dashboard.run("return faint(a)", MIN_CONTRAST)
    assert found["count"] > 60
    assert found["wrong"] == []


def test_controls_have_names(filled):
    filled.click("#settings-button")
    assert unnamed(filled) == []
    filled.run("document.querySelector('#send').removeAttribute('aria-label')")
    assert unnamed(filled) == ["button"]
    filled.run("document.querySelector('#send').setAttribute('aria-label', 'Send')")


def test_controls_of_the_dashboard_have_names(dashboard):
    assert unnamed(dashboard) == []


def focused(page) -> str:
    return page.run("const one = document.activeElement; return one.id || one.className || one.tagName")


def test_the_order_of_focus(chat, script):
    script.answers.append(said("Hello.", "Hm."))
    chat.fill("#prompt", "hi")
    chat.press("Enter")
    chat.wait("document.querySelector('.again') && document.querySelector('#stop').hidden")
    assert focused(chat) == "prompt"
    chat.run("document.activeElement.blur(); document.querySelector('.skip').focus()")
    order = []
    while focused(chat) != "thinking":
        order.append(focused(chat))
        chat.press("Tab")
    assert order == [
        *("skip", "new", "title", "quiet remove", "drawer-foot", "model", "settings-button"),
        *("log", "quiet", "quiet edit", "SUMMARY", "quiet", "quiet again", "prompt"),
    ]  # fmt: skip
    chat.press("Tab", SHIFT)
    assert focused(chat) == "prompt"
    chat.run("document.querySelector('.skip').focus()")
    chat.press("Enter")
    chat.wait("document.activeElement.id === 'prompt'")


def test_a_panel_over_the_page_keeps_the_focus_until_escape(chat):
    chat.resize(400, 700)
    chat.wait("document.querySelector('#sidebar').hidden")
    for name, first in (("settings", "settings-close"), ("sidebar", "sidebar-close")):
        chat.click(f"#{name}-button")
        assert focused(chat) == first
        for _ in range(14):
            chat.press("Tab")
            assert chat.run("return document.activeElement.matches(a)", f"body, #{name}, #{name} *")
        chat.press("Escape")
        assert focused(chat) == f"{name}-button"
        assert chat.run(f"return document.querySelector('#{name}').hidden")


def test_a_new_size_brings_the_panels_back(chat):
    chat.resize(400, 700)
    chat.wait("document.querySelector('#sidebar').hidden")
    chat.resize(1300, 700)
    chat.wait("!document.querySelector('#sidebar').hidden")
    assert not chat.run("return document.querySelector('main').inert")
