"""The dashboard's figures are those that the metrics say, whatever is missing, restarts or fails."""

from pathlib import Path

import pytest

from tests.browser.scripted import Script

pytestmark = pytest.mark.browser

CLOCK = Path(__file__).with_name("clock.js").read_text(encoding="utf-8")
NONE = "\N{EN DASH}"  # what stands where nothing is known
BOUNDS = ("0.1", "0.2", "0.4", "+Inf")


def histogram(name: str, counts: tuple[int, ...]) -> list[str]:
    """Lines of a histogram whose buckets hold these counts, each with those below it."""
    totals = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [f'{name}_bucket{{le="{le}",model_name="m"}} {n}' for le, n in zip(BOUNDS, totals, strict=True)]


def metrics(second: int, *, per_second: int = 50, without: str = "") -> str:
    """A server that generates `per_second` tokens and four times as many prompt tokens each second."""
    tokens = 1000 + per_second * second
    lines = [
        "# HELP vllm:num_requests_running Requests.",
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{model_name="m"} 3',
        "vllm:num_requests_waiting 1",
        "vllm:kv_cache_usage_perc 0.25",
        f'vllm:generation_tokens_total{{model_name="m"}} {tokens}',
        f"vllm:prompt_tokens_total {4 * tokens}",
        f"vllm:prefix_cache_queries_total {4 * tokens}",
        f"vllm:prefix_cache_hits_total {3 * tokens}",
        f'glm5:prefix_cache_hit_tokens_total{{tier="device"}} {2 * tokens}',
        f'glm5:prefix_cache_hit_tokens_total{{tier="host"}} {tokens}',
        f"vllm:spec_decode_num_drafts_total {10 * second}",
        f"vllm:spec_decode_num_accepted_tokens_total {12 * second}",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {8 * second}',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {4 * second}',
        *histogram("vllm:time_to_first_token_seconds", (0, 10 * second, 0, 0)),
        *histogram("vllm:inter_token_latency_seconds", (60 * second, 30 * second, 10 * second, 0)),
        *histogram("vllm:e2e_request_latency_seconds", (0, 0, 0, 5 * second)),
    ]
    return "\n".join(line for line in lines if not without or without not in line) + "\n"


FIGURES = {
    "Generation, generated": "50",
    "Prompts, prompt": "200",
    "Requests, running": "3",
    "Requests, waiting": "1",
    "KV cache, in use": "25 %",
    # Ten a second between 0.1 and 0.2, evenly.
    "Time to first token, p50": "150 ms",
    "Time to first token, p90": "190 ms",
    "Time to first token, p99": "199 ms",
    "Time between tokens, p50": "83.3 ms",
    "Time between tokens, p90": "200 ms",
    "Time between tokens, p99": "380 ms",
    # Beyond the last bound nothing is known but the bound.
    "Whole requests, p50": "400 ms",
    "Prefix cache, device": "50 %",
    "Prefix cache, host": "25 %",
    "Prefix cache, disk": NONE,
    "Prefix cache, any tier": "75 %",
    "Speculation, 1": "80 %",
    "Speculation, 2": "40 %",
    "Speculation, tokens per step": "2.2",
}


def start(page, script: Script, answers: list[str | None]):
    """The dashboard with a clock that stands still; it has asked once."""
    script.metrics = answers
    page.add_script(CLOCK)
    page.open(f"{page.url}/dashboard")
    page.wait("document.querySelector('#updated').textContent")


def table(page, column: int = 0) -> dict[str, str]:
    """The visible rows of the table."""
    body = """
    const rows = [...document.querySelectorAll("#rows tr")].filter((row) => !row.hidden);
    return rows.map((row) => [row.cells[0].firstChild.data, row.cells[a + 1].textContent]);"""
    return dict(page.run(body, column))


def figure(page, name: str) -> str:
    return table(page)[name]


def chart(page, title: str, expression: str):
    """The value of JavaScript about the chart `card` with this title."""
    body = f"""
    const card = [...document.querySelectorAll(".chart")].find((one) => one.querySelector("h2").innerText === a);
    return {expression};"""
    return page.run(body, title)


def num_pieces(page) -> int:
    """How many unbroken lines the generation's chart has."""
    return chart(page, "Generation", "card.querySelector('.stroke').getAttribute('d').split('M').length - 1")


def test_figures(page, script):
    start(page, script, [metrics(second) for second in range(0, 41, 4)])
    assert figure(page, "Generation, generated") == NONE
    assert figure(page, "Requests, running") == "3"
    page.run("await clock.turn(10, 4)")
    found = table(page)
    assert {name: found[name] for name in FIGURES} == FIGURES
    assert "Speculation, 3" not in found
    assert page.text("#model") == "m"
    assert " ".join(page.text("#tiles").split()) == (
        "Generation 50 tokens/s Prompts 200 tokens/s Running 3 requests Waiting 1 requests KV cache 25 % in use "
        "First token 150 ms median Prefix cache 75 % of prompts found Speculation 2.2 tokens per step"
    )


def test_mean_and_highest(page, script):
    rates = [0, 10, 10, 10, 10, 10, 10, 70, 70, 70, 70]
    totals = [sum(rates[: i + 1]) for i in range(len(rates))]
    start(page, script, [f"vllm:generation_tokens_total {n}\n" for n in totals])
    page.run(f"await clock.turn({len(rates) - 1})")
    assert figure(page, "Generation, generated") == "70"
    # Rates are over three seconds: 10 six times, 30, 50, then 70 twice.
    assert table(page, 1)["Generation, generated"] == "28"
    assert table(page, 2)["Generation, generated"] == "70"


@pytest.mark.parametrize(
    ("without", "lost"),
    [
        ("num_requests", ["Requests, running", "Requests, waiting"]),
        ("spec_decode", ["Speculation, tokens per step"]),
        ("prefix_cache_queries", ["Prefix cache, device", "Prefix cache, host", "Prefix cache, any tier"]),
        ("time_to_first", [f"Time to first token, {each}" for each in ("p50", "p90", "p99")]),
        ("vllm:", [name for name in FIGURES if name not in ("Speculation, 1", "Speculation, 2")]),
    ],
)
def test_a_missing_metric_costs_only_its_figures(page, script, without, lost):
    start(page, script, [metrics(second, without=without) for second in range(8)])
    page.run("await clock.turn(7)")
    found = table(page)
    assert {found[name] for name in lost} == {NONE}
    kept = {name: text for name, text in FIGURES.items() if name in found and name not in lost and without != "vllm:"}
    assert {name: found[name] for name in kept} == kept
    if without == "spec_decode":
        assert chart(page, "Speculation", "card.querySelector('.note').innerText") == "Not reported by this server."
        assert chart(page, "Speculation", "card.querySelectorAll('li:not([hidden])').length") == 0
        assert chart(page, "Generation", "card.querySelector('.note').innerText") == ""


def test_no_answer_leaves_a_gap_and_says_why(page, script):
    start(page, script, [*map(metrics, range(4)), None, None, *map(metrics, range(6, 12))])
    page.run("await clock.turn(3)")
    assert num_pieces(page) == 1
    page.run("await clock.turn(1)")
    assert page.text("#status") == "No metrics"
    assert page.text("#problem") == "503 · server_error: gone"
    assert figure(page, "Requests, running") == NONE
    page.run("await clock.turn(6)")
    assert page.text("#status") == "Live"
    assert page.has("#problem[hidden]")
    assert figure(page, "Generation, generated") == "50"
    assert num_pieces(page) == 2
    assert len(page.problems) == 2
    page.problems.clear()


def test_a_restarted_server_gives_no_negative_figures(page, script):
    start(page, script, [*map(metrics, range(100, 105)), *[metrics(second, per_second=30) for second in range(5)]])
    page.run("await clock.turn(5)")
    assert figure(page, "Generation, generated") == NONE
    page.run("await clock.turn(4)")
    assert figure(page, "Generation, generated") == "30"
    assert figure(page, "Time to first token, p50") == "150 ms"


def test_an_engine_that_is_not_up(page, script):
    start(page, script, [f"glm5:engine_up {up}\nvllm:num_requests_running 0\n" for up in (0, 1)])
    assert page.text("#status") == "Engine not up"
    assert "/health" in page.text("#problem")
    assert figure(page, "Requests, running") == "0"
    page.run("await clock.turn(1)")
    assert page.text("#status") == "Live"
    assert page.has("#problem[hidden]")


def test_pausing(page, script):
    start(page, script, [metrics(second) for second in range(60)])
    page.run("await clock.turn(3)")
    polls = script.num_polls
    page.click("#pause")
    assert page.text("#status") == "Paused"
    assert page.attribute("#pause", "aria-pressed") == "true"
    before = page.text("#updated")
    page.run("await clock.turn(20)")
    assert (script.num_polls, page.text("#updated")) == (polls, before)
    page.click("#pause")
    page.wait("document.querySelector('#status').textContent === 'Live'")
    assert figure(page, "Generation, generated") == NONE
    page.run("await clock.turn(4)")
    assert figure(page, "Generation, generated") == "50"
    assert num_pieces(page) == 2


def test_pointing_shows_the_values_of_that_time_in_every_chart(page, script):
    gauges = [f"vllm:num_requests_running {n}\nvllm:kv_cache_usage_perc {n / 100}\n" for n in range(0, 31, 3)]
    start(page, script, gauges)
    page.run("await clock.turn(10, 3)")
    place = chart(page, "Requests", "card.querySelector('.plot').getBoundingClientRect().toJSON()")
    # The last minute lies between the margins; fifteen seconds ago is three quarters of the way.
    page.hover(place["x"] + 52 + (place["width"] - 62) * 0.75, place["y"] + place["height"] / 2)
    page.wait("document.querySelector('.moment').innerText === '12:00:15'")
    assert chart(page, "Requests", "card.querySelector('.value').innerText") == "15"
    assert chart(page, "KV cache", "card.querySelector('.value').innerText") == "15 %"
    label = chart(page, "KV cache", "card.querySelector('.plot').getAttribute('aria-label')")
    assert label == "KV cache, share in use: 12:00:15 in use 15 %"
    assert chart(page, "KV cache", "card.querySelectorAll('.dot').length") == 1
    page.hover(2, 2)
    page.wait("document.querySelector('.moment').innerText === ''")
    assert chart(page, "KV cache", "card.querySelector('.value').innerText") == "30 %"
    chart(page, "KV cache", "card.querySelector('.plot').focus()")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert chart(page, "Requests", "card.querySelector('.value').innerText") == "24"
    page.press("Escape")
    assert chart(page, "Requests", "card.querySelector('.value').innerText") == "30"


def test_axes(page, script):
    start(page, script, [f"vllm:num_requests_running {n}\n" for n in (0, 7)])
    page.run("await clock.turn(1)")
    labels = "Array.from(card.querySelectorAll('.{}-label'), (one) => one.textContent)"
    assert chart(page, "Requests", labels.format("y")) == ["0", "2", "4", "6", "8"]
    assert chart(page, "Requests", labels.format("x")) == ["11:59:15", "11:59:30", "11:59:45"]


def test_axes_end_near_the_highest_value(page):
    page.open(page.url)
    highest = [0, 0.013, 3, 99, 101, 25000]
    steps = page.run("const { axisSteps } = await import('/page/units.js'); return a.map((n) => axisSteps(n))", highest)
    assert [one[-1] for one in steps] == pytest.approx([1, 0.015, 3, 100, 125, 25000])
    assert all(4 <= len(one) <= 6 for one in steps)
    assert page.run("const { axisSteps } = await import('/page/units.js'); return axisSteps(0, true)") == [0, 1]


def test_ten_minutes_are_kept(page):
    page.open(page.url)
    body = """
    const { History } = await import("/page/history.js");
    const { parseMetrics } = await import("/page/prometheus.js");
    const history = new History();
    for (let t = 0; t < 1500; t += 1) history.add(t, parseMetrics(`vllm:generation_tokens_total ${t}`));
    return [history.samples.length, history.states.length, history.samples[0].time];"""
    assert page.run(body) == [600, 31, 900]


def test_a_clock_that_is_set_back_begins_anew(page):
    """The browser's: what was noted at times yet to come says nothing about now."""
    page.open(page.url)
    body = """
    const { History } = await import("/page/history.js");
    const { parseMetrics } = await import("/page/prometheus.js");
    const history = new History();
    const add = (t, count) => history.add(t, parseMetrics(`vllm:generation_tokens_total ${count}`));
    for (let t = 0; t < 20; t += 1) add(4000 + t, 10 * t);
    for (let t = 20; t < 24; t += 1) add(400 + t, 10 * t);
    return history.samples.map((one) => [one.time, one.figures.generation]);"""
    assert page.run(body) == [[420, None], [421, 10], [422, 10], [423, 10]]


def test_the_text_format(page):
    page.open(page.url)
    text = (
        "# HELP a b\n# TYPE a counter\n"
        'a{x="1, {2}\\" \\\\ \\n",y="z"} 5 1700000000000\r\n'
        'a{x="other",} 1e3\nb 0\nc +Inf\nd NaN\n\nnot a line\nbroken{ 3\ne -Inf\n# EOF\n'
    )
    body = """
    const { parseMetrics, total } = await import("/page/prometheus.js");
    const metrics = parseMetrics(a);
    const labels = metrics.get("a").map((one) => one.labels);
    const part = total(metrics, "a", { y: "z" });
    const none = total(metrics, "none") === undefined;
    return [[...metrics.keys()], labels, total(metrics, "a"), part, String(total(metrics, "c")), none];"""
    names, labels, whole, part, infinite, none = page.run(body, text)
    assert names == ["a", "b", "c", "d", "e"]
    assert labels == [{"x": '1, {2}" \\ \n', "y": "z"}, {"x": "other"}]
    assert (whole, part, infinite, none) == (1005, 5, "Infinity", True)


def test_a_key_is_asked_for(page, script):
    script.needed_key = "secret"
    start(page, script, [metrics(0)])
    assert page.text("#problem").startswith("401")
    page.fill("#key", "secret")
    page.press("Enter")
    page.run("await clock.turn(1)")
    assert page.text("#status") == "Live"
    assert page.has("#key-form[hidden]")
    page.problems.clear()
