"""The pictures of the pages that the documents show: `python -m tests.browser.screenshots docs/images`.

What they show is the same in every run: a scripted server answers, and the pages' clock is turned by hand. Each file
holds the text that is visible on it, so that a test can tell when a picture is out of date.
"""

import io
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from tests.browser.devtools import Browser, Page, find_browser
from tests.browser.run_pages import run_pages
from tests.browser.scripted import DONE, Answer, Gate, Script, create_app, delta, running, said, usage
from tests.support.rl_run import write_run

CLOCK = Path(__file__).with_name("clock.js").read_text(encoding="utf-8")
NUM_COLORS = 256
TEXT = "Description"  # the name of a PNG's field

NUM_POLLS, POLL_SECONDS = 76, 4
ENDED = "document.querySelector('#stop').hidden"

TOOL = {
    "name": "forecast",
    "description": "The weather of one day.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "string"}}},
}
ARGUMENTS = '{"city": "Hamburg", "day": "tomorrow"}'
RESULT = '{"rain_mm": 0.2, "wind_kmh": 14, "high_c": 19}'
QUESTION = "Should I take the bike to work in Hamburg tomorrow?"
THOUGHTS = ("The weather decides. I ask for tomorrow's forecast first.", "Hardly any rain, little wind.")
ADVICE = """
**Yes**, tomorrow is a day for the bike.

| | Forecast | For a ride |
|---|---:|---|
| Rain | 0.2 mm | a few drops, most likely at noon |
| Wind | 14 km/h | hardly felt |
| Highest | 19 °C | no jacket needed |
"""


@dataclass(frozen=True)
class Step:
    """A part of an answer: what comes after how many seconds, and what is then true on the page."""

    seconds: float
    content: dict[str, Any]
    shown: str


def chat_picture(page: Page, script: Script) -> None:
    """A conversation with thought, a tool call and its result; the settings beside it."""
    page.open(page.url)
    page.wait("document.querySelector('#model').value")
    for text in ("Explain sparse attention to a colleague", "A regular expression for ISO dates"):
        script.answers.append(said("Gladly."))
        _say(page, text)
        page.wait(f"{ENDED} && document.querySelector('.assistant')")
        page.click("#new")
    page.click("#settings-button")
    page.fill("#set-temperature", "0.7")
    page.fill("#set-tools", json.dumps([{"type": "function", "function": TOOL}], indent=2))
    call = {"index": 0, "id": "call-1", "function": {"name": "forecast", "arguments": ARGUMENTS}}
    steps = [
        Step(0.28, {"reasoning_content": THOUGHTS[0]}, "document.querySelector('.thinking.now:not([hidden])')"),
        Step(1.1, {"tool_calls": [call]}, "document.querySelector('.call-name')?.innerText === 'forecast'"),
    ]
    _play(page, script, steps, usage(212, 61), lambda: _say(page, QUESTION))
    page.fill(".call textarea", RESULT)
    steps = [
        Step(0.09, {"reasoning_content": THOUGHTS[1]}, "document.querySelector('.thinking.now:not([hidden])')"),
        Step(0.6, {"content": ADVICE[:20]}, "document.querySelector('.markdown strong')"),
        Step(1.7, {"content": ADVICE[20:]}, "document.querySelector('.markdown table')"),
    ]
    cached = {"cached_tokens": 256}
    _play(page, script, steps, usage(316, 148, prompt_tokens_details=cached), lambda: page.click(".results button"))
    page.run("document.activeElement.blur(); document.querySelector('#set-tools').scrollTop = 0")


def dashboard_picture(page: Page, script: Script) -> None:
    """Five minutes of a busy server."""
    script.metrics = list(_metrics(NUM_POLLS, POLL_SECONDS))
    page.open(f"{page.url}/dashboard")
    page.wait("document.querySelector('#updated').textContent")
    page.run("await clock.turn(a, b)", NUM_POLLS - 1, POLL_SECONDS)


def rollouts_picture(page: Page, script: Script) -> None:
    """A rollout of a hidden number, its tokens coloured by the trainer's ratio."""
    page.open(f"{page.run_url}/steps/3/groups/12?colour=ratio&rollout=4")


PICTURES: dict[str, tuple[Callable[[Page, Script], None], tuple[int, int]]] = {
    "chat": (chat_picture, (1280, 950)),
    "dashboard": (dashboard_picture, (1280, 925)),
    "rollouts": (rollouts_picture, (1280, 900)),
}


def take(browser: Browser, folder: Path) -> list[Path]:
    """Make every picture, as `folder/NAME.png`."""
    paths = []
    with tempfile.TemporaryDirectory() as runs:
        write_run(Path(runs) / "rl-guess", num_groups=15, size=16)
        for name, (compose, size) in PICTURES.items():
            script = Script()
            servers = running(create_app(script)), run_pages(Path(runs) / "rl-guess")
            with servers[0] as url, servers[1] as run_url, browser.page(*size) as page:
                page.url, page.run_url = url, run_url
                page.add_script(CLOCK)
                page.prefer("light")
                compose(page, script)
                page.run("await document.fonts.ready; await new Promise(requestAnimationFrame)")
                text = " ".join(page.text("body").split())
                paths.append(_save(page.screenshot(), text, folder / f"{name}.png"))
                assert not page.problems, page.problems
    return paths


def text_of(path: Path) -> str:
    """What a picture's page said."""
    with Image.open(path) as image:
        image.load()
        return image.info[TEXT]


def _save(png: bytes, text: str, path: Path) -> Path:
    about = PngImagePlugin.PngInfo()
    about.add_itxt(TEXT, text, zip=True)
    # The colours used most, as they are; the others, of letters' edges, become the nearest of those.
    image = Image.open(io.BytesIO(png)).convert("RGB")
    colors = sorted(image.getcolors(image.width * image.height) or [], reverse=True)[:NUM_COLORS]
    palette = Image.new("P", (1, 1))
    palette.putpalette(bytes(chain.from_iterable(color for _, color in colors)))
    few = image.quantize(palette=palette, dither=Image.Dither.NONE)
    few.save(path, optimize=True, pnginfo=about)
    return path


def _say(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("Enter")


def _play(page: Page, script: Script, steps: list[Step], end: bytes, ask: Callable[[], None]) -> None:
    """Let the server answer in these steps, the page's clock going on before each."""
    gates = [Gate() for _ in steps]
    parts = [[gate, delta(**step.content)] for gate, step in zip(gates, steps, strict=True)]
    script.answers.append(Answer([*chain(*parts), delta("stop"), end, DONE]))
    ask()
    for gate, step in zip(gates, steps, strict=True):
        page.run("clock.now += 1000 * a", step.seconds)
        gate.open()
        page.wait(step.shown)
    page.wait(ENDED)


def _metrics(num_polls: int, seconds: float) -> Iterator[str]:
    """A server's metrics at each poll: load comes in waves, a third of the prompts is known already."""
    counters: Counter[str] = Counter()
    for poll in range(num_polls):
        wave = 0.5 + 0.3 * math.sin(poll / 7) + 0.15 * math.sin(poll / 2.3)
        running, tokens = round(4 + 20 * wave), seconds * (300 + 900 * wave)
        prompt, drafts = 3.2 * tokens, tokens / 2.4
        for name, grown in {
            'vllm:generation_tokens_total{model_name="glm-5-nano"}': tokens,
            "vllm:prompt_tokens_total": prompt,
            "vllm:prefix_cache_queries_total": prompt,
            "vllm:prefix_cache_hits_total": prompt * (0.62 + 0.1 * math.sin(poll / 9)),
            'glm5:prefix_cache_hit_tokens_total{tier="device"}': prompt * 0.42,
            'glm5:prefix_cache_hit_tokens_total{tier="host"}': prompt * (0.13 + 0.05 * math.sin(poll / 9)),
            'glm5:prefix_cache_hit_tokens_total{tier="disk"}': prompt * (0.07 + 0.05 * math.sin(poll / 9)),
            "vllm:spec_decode_num_drafts_total": drafts,
            "vllm:spec_decode_num_accepted_tokens_total": drafts * 1.4,
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': drafts * (0.8 + 0.04 * wave),
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"}': drafts * (0.4 + 0.06 * wave),
            **_observed("vllm:time_to_first_token_seconds", tokens / 200, 0.2 + 0.5 * wave),
            **_observed("vllm:inter_token_latency_seconds", tokens, 0.014 + 0.02 * wave),
            **_observed("vllm:e2e_request_latency_seconds", tokens / 200, 3 + 9 * wave),
        }.items():
            counters[name] += round(grown)
        gauges = {
            "vllm:num_requests_running": running,
            "vllm:num_requests_waiting": max(0, running - 15),
            "vllm:kv_cache_usage_perc": round(0.2 + 0.6 * wave, 3),
        }
        yield "".join(f"{name} {value}\n" for name, value in (gauges | counters).items())


def _observed(name: str, count: float, median: float) -> dict[str, float]:
    """What a histogram grows by: observations that lie around a median, a factor of two either way as a rule."""
    bounds = [0.001 * 1.3**power for power in range(45)]
    shares = [1 / (1 + (median / bound) ** 4) for bound in bounds]
    return {
        f'{name}_bucket{{le="{bound:.4g}"}}': count * share for bound, share in zip(bounds, shares, strict=True)
    } | {f'{name}_bucket{{le="+Inf"}}': count}


def main() -> None:
    path = find_browser()
    if path is None:
        sys.exit("This needs Chromium on the path (Debian's package chromium).")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(path, Path(profile))
        try:
            for picture in take(browser, folder):
                print(picture)
        finally:
            browser.close()


if __name__ == "__main__":
    main()
