"""Streams are read the same however they are cut, and end when the reader or the server does."""

import json

import pytest

from tests.browser.scripted import DONE, Answer, delta, event, usage

pytestmark = pytest.mark.browser

# Characters of one to four bytes, every line end, comments, fields that mean nothing here, data in several lines.
STREAM = (
    '\ufeffdata: {"é": "日本"}\n\n'
    ": keep-alive\r\n\r\n"
    "event: x\r\ndata: one\r\ndata: two 😀\r\n\r\n"
    "id: 7\rdata:no space\rdata\r\r"
    "data:  two spaces\n\n\n\n"
    "data: [DONE]\n\n"
    "data: never ended"
)
EVENTS = ['{"é": "日本"}', "one\ntwo 😀", "no space\n", " two spaces", "[DONE]"]

# All events of the bytes `a`, which arrive in chunks that end at the places `b`.
READ = """
const { events } = await import("/page/sse.js");
const bytes = Uint8Array.from(a);
const found = [];
for (const ends of b) {
  const chunks = ends.map((end, i) => bytes.slice(i ? ends[i - 1] : 0, end));
  const stream = new ReadableStream({ start(controller) {
    chunks.forEach((chunk) => controller.enqueue(chunk));
    controller.close();
  } });
  const one = [];
  for await (const data of events(stream)) one.push(data);
  found.push(JSON.stringify(one));
}
return [...new Set(found)].map((one) => JSON.parse(one));
"""


def read(page, text: str, cuts: list[list[int]]) -> list[list[str]]:
    """The different results that these ways to cut a text have."""
    content = text.encode()
    return page.run(READ, list(content), [[*cut, len(content)] for cut in cuts])


def test_a_stream_may_be_cut_anywhere(page, rng):
    page.open(page.url)
    size = len(STREAM.encode())
    once = [[cut] for cut in range(size)]
    often = [sorted(rng.sample(range(size), 12)) for _ in range(200)]
    assert read(page, STREAM, [[], list(range(1, size)), *once, *often]) == [EVENTS]


def test_the_reader_of_events_can_be_wrong(page):
    """The control: another stream gives other events."""
    page.open(page.url)
    assert read(page, STREAM.replace("\n\n", "\n"), [[]]) != [EVENTS]


def test_leaving_early_cancels_the_stream(page):
    page.open(page.url)
    body = """
    const { events } = await import("/page/sse.js");
    let cancelled = false;
    const pull = (to) => to.enqueue(new TextEncoder().encode("data: x\\n\\n"));
    const cancel = () => { cancelled = true; };
    for await (const data of events(new ReadableStream({ pull, cancel }))) break;
    return cancelled;"""
    assert page.run(body) is True


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_an_answer_in_pieces(chat, script, size):
    calls = [{"index": 0, "id": "call-1", "function": {"name": "look", "arguments": ""}}]
    rest = [{"index": 0, "function": {"arguments": '{"wo": "naïve 日本"}'}}]
    stream = b"".join(
        [
            b": a comment\n\n",
            delta(role="assistant", reasoning_content="Grüße — 日本 "),
            delta(reasoning="🤔"),
            delta(content="Héllo "),
            delta(content="wörld 👩‍👩‍👧"),
            delta(tool_calls=calls),
            delta(tool_calls=rest),
            delta("tool_calls"),
            usage(3, 9),
            DONE,
        ]
    )
    script.answers.append(Answer([stream[i : i + size] for i in range(0, len(stream), size)]))
    chat.fill("#prompt", "hi")
    chat.press("Enter")
    chat.wait("document.querySelector('.results')")
    stored = chat.run("return Object.values(localStorage).map(JSON.parse)")[0]["messages"][1]
    assert stored["reasoning"] == "Grüße — 日本 🤔"
    assert stored["content"] == "Héllo wörld 👩‍👩‍👧"
    assert stored["calls"] == [{"id": "call-1", "name": "look", "arguments": '{"wo": "naïve 日本"}'}]
    assert (stored["finish"], stored["figures"]["tokens"], stored["error"]) == ("tool_calls", 9, None)


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ([delta(content="Half")], "The connection ended before the answer did."),
        ([delta(content="Half"), event({"error": {"message": "out of luck", "code": "x"}}), DONE], "out of luck"),
        ([delta(content="Half"), event({"error": "plain words"})], "plain words"),
        ([delta(content="Half"), b"data: <html>\n\n"], "no JSON: <html>"),
    ],
)
def test_a_stream_that_breaks_keeps_what_came(chat, script, parts, shown):
    script.answers.append(Answer(parts))
    chat.fill("#prompt", "hi")
    chat.press("Enter")
    chat.wait("document.querySelector('.error')")
    assert shown in chat.text(".error")
    assert chat.text(".assistant .markdown:not(.thinking *)") == "Half"
    assert json.loads(chat.run("return Object.values(localStorage)[0]"))["messages"][1]["content"] == "Half"
