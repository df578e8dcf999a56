"""Markdown becomes the right elements, never markup of its own, in bounded time."""

import pytest

from tests.browser.scripted import EMPTY

pytestmark = pytest.mark.browser

RENDER = """
const { render } = await import("/page/markdown.js");
const parent = document.createElement("div");
"""
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'
HI = f'<a href="http://h.i/" {LINK}>http://h.i</a>'
CODE = 'class="code"'

CASES = [
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("# A\n### B #x", '<h3 class="level-1">A</h3><h5 class="level-3">B #x</h5>'),
    (
        "**b** *i* ***x*** __b__ _i_ ~~d~~",
        "<p><strong>b</strong> <em>i</em> <em><strong>x</strong></em> <strong>b</strong> <em>i</em> <del>d</del></p>",
    ),
    ("*a **b** c* **a *b***", "<p><em>a <strong>b</strong> c</em> <strong>a <em>b</em></strong></p>"),
    ("snake_case_name 2 * 3 * 4 a~b", "<p>snake_case_name 2 * 3 * 4 a~b</p>"),
    ("`a*b*` ``c ` d`` `open", "<p><code>a*b*</code> <code>c ` d</code> `open</p>"),
    ("*a `*` b*", "<p><em>a <code>*</code> b</em></p>"),
    (r"\*not\* \[x](https://a.b) \n", f'<p>*not* [x](<a href="https://a.b/" {LINK}>https://a.b</a>) \\n</p>'),
    ("- a\n- b\n  - c\n\n    d\n- e", "<ul><li>a</li><li>b<ul><li>c<p>d</p></li></ul></li><li>e</li></ul>"),
    ("3. a\n4. b\n   more\nlazy", '<ol start="3"><li>a</li><li>b<br>more<br>lazy</li></ol>'),
    ("- a\n\n- b", '<ul class="loose"><li>a</li><li>b</li></ul>'),
    ("* a\n- b", "<ul><li>a</li></ul><ul><li>b</li></ul>"),
    ("1. a\n  - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
    ("a\n- b\n\nc", "<p>a</p><ul><li>b</li></ul><p>c</p>"),
    ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"),
    ("---\n* * *\n--", "<hr><hr><p>--</p>"),
    ("[a *b*](https://c.d/e_(f) \"t\")", f'<p><a href="https://c.d/e_(f)" {LINK}>a <em>b</em></a></p>'),
    (
        "https://a.b/c_d?e=f&g, (http://h.i).",
        f'<p><a href="https://a.b/c_d?e=f&amp;g" {LINK}>https://a.b/c_d?e=f&amp;g</a>, (' + HI + ").</p>",
    ),
    ("![alt](https://a.b/c.png)", f'<p><a href="https://a.b/c.png" {LINK}>image: alt</a></p>'),
    ("<mail@x.y> [m](mailto:a@b.c)", f'<p>&lt;mail@x.y&gt; <a href="mailto:a@b.c" {LINK}>m</a></p>'),
    ("[0, 1) and [x](no/scheme) [y]", "<p>[0, 1) and [x](no/scheme) [y]</p>"),
    ("a | b\n--|:-:\n1 | \\| *2*", None),
]  # fmt: skip

HOSTILE = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "[x](javascript:window.hit=1)",
    "[x](JaVa\tScript:window.hit=1)",
    "[x](<java\u0000script:window.hit=1>)",
    "[x](&#106;avascript:window.hit=1)",
    "[x](data:text/html,<script>window.hit=1</script>)",
    "[x](vbscript:window.hit=1) [x](blob:https://a/b) [x](file:///etc)",
    '[x](https://a.b/"onmouseover="window.hit=1)',
    '![x](https://a.b/"onerror="window.hit=1)',
    '```html"><script>window.hit=1</script>\n<script>window.hit = 1</script>\n```',
    "| <svg onload=window.hit=1> |\n|---|\n| <iframe src=javascript:window.hit=1> |",
    "# <details open ontoggle=window.hit=1>\n> <math><a xlink:href=javascript:window.hit=1>",
    "- `<b>` **<a href=javascript:window.hit=1>x</a>**",
    "https://a.b/<script>window.hit=1</script>",
]
ALLOWED = [
    *("a", "blockquote", "br", "button", "code", "del", "div", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p"),
    *("path", "pre", "span", "strong", "svg", "table", "tbody", "td", "th", "thead", "tr", "ul"),
]
LONG = 100_000
SLOW = [
    "*" * LONG, "*a " * LONG, "_a **b " * LONG, "[" * LONG, "[a](" * LONG, "`" * LONG, "`a ``b " * LONG, "> " * LONG,
    "- " * LONG, "| " * LONG, "|\n|-\n" * LONG, "- a\n" * LONG, "  " * LONG + "x", "# " * LONG, "\\" * LONG,
    "\n" * LONG, "http://" * LONG, "https://a.b/" + ")" * LONG, "1. a\n\n" * LONG, "a\n" * LONG,
    "".join("  " * n + "- a\n" for n in range(300)),
    "![a](https://b.c " * LONG, "~~a" * LONG, "a_" * LONG, "-" * LONG + "x", "```" + "`" * LONG, "\t" * LONG,
]  # fmt: skip


@pytest.fixture(scope="module")
def page(tab, server):
    """Loaded once: nothing here changes it."""
    tab.forget(server[1] + EMPTY)
    tab.open(server[1])
    yield tab
    assert not tab.problems


@pytest.fixture
def html(page):
    return lambda text: page.run(f"{RENDER} render(parent, a); return parent.innerHTML", text)


def test_elements(html):
    for text, expected in CASES:
        if expected is not None:
            assert html(text) == expected, text


def test_code(html):
    found = html("a\n```python\n*x* <y>\n  indented\n\n```\nb\n~~~\nopen")
    assert found.count(CODE) == 2
    assert "<code>*x* &lt;y&gt;\n  indented\n</code>" in found
    assert found.startswith("<p>a</p>")
    assert "<span>python</span>" in found
    assert found.endswith("<code>open</code></pre></div>")
    assert "<p>b</p>" in found


def test_tables(html):
    found = html("a | b\n:--|--:\n1 | x \\| *2*\n3\n\nno | table")
    assert '<th class="right">b</th>' in found
    assert '<td class="right">x | <em>2</em></td>' in found
    assert found.endswith("<p>3</p><p>no | table</p>")


def test_text_grows_into_the_same_elements(page, html):
    """Also that finished blocks keep their elements, which selections and scroll positions need."""
    text = "\n\n".join(text for text, _ in CASES) + "\n\n```js\nlet a = `b`;\n```\n\nend"
    body = f"""{RENDER}
    const first = [];
    for (let end = 1; end <= a.length; end += 1) {{
      render(parent, a.slice(0, end));
      if (end % 50 === 0) first.push(parent.firstChild);
    }}
    return [parent.innerHTML, new Set(first).size];"""
    grown, num_first = page.run(body, text)
    assert grown == html(text)
    assert num_first == 1


def test_markup_stays_text(page):
    text = "\n\n".join(HOSTILE)
    body = f"""{RENDER}
    render(parent, a);
    document.body.append(parent);
    const wrong = [];
    for (const element of parent.querySelectorAll("*")) {{
      if (!b.includes(element.tagName.toLowerCase())) wrong.push(element.tagName);
      for (const {{ name, value }} of element.attributes) {{
        if (name.startsWith("on") || name === "src" || name === "style") wrong.push(name);
        if (name === "href" && !/^(https?|mailto):/.test(value)) wrong.push(value);
      }}
    }}
    for (const link of parent.querySelectorAll("a")) if (!link.rel.includes("noopener")) wrong.push(link.rel);
    await new Promise((done) => setTimeout(done, 0));
    parent.remove();
    return [wrong, window.hit ?? null, parent.textContent];"""
    wrong, hit, shown = page.run(body, text, ALLOWED)
    assert (wrong, hit) == ([], None)
    assert "<script>window.hit = 1</script>" in shown


def test_the_policy_refuses_what_the_renderer_never_does(page):
    """The control: were there a way to markup, the browser would close it."""
    body = """
    try { document.createElement("div").innerHTML = "<b>x</b>"; } catch (error) { return error.name; }
    return "allowed";"""
    assert page.run(body) == "TypeError"
    assert any("TrustedHTML" in problem for problem in page.problems)
    page.problems.clear()


@pytest.mark.parametrize("number", range(len(SLOW)))
def test_no_text_takes_long(page, number):
    """It has to end before the protocol's limit; a quadratic reader would need minutes."""
    text = SLOW[number][:LONG]
    assert page.run(f"{RENDER} render(parent, a); return parent.childNodes.length", text) >= bool(text.strip())
