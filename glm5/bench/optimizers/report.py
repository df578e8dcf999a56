"""Results as a table and as a plot of held-out loss, mean and range over seeds."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from glm5.bench.optimizers.runs import WAYS, Done

WIDTH, HEIGHT, LEFT, RIGHT, BELOW = 760, 360, 60, 24, 44  # of the picture, in pixels
COLOURS = dict(zip(WAYS, ("#1f5fbf", "#2b8a57", "#c2410c"), strict=True))


@dataclass(frozen=True)
class Line:
    """An optimizer's results. `search`: losses of the search by rate. `each`: final held-out loss by seed, with `mean`
    and standard deviation `spread`; `half_way`: the mean at half of the steps. `step_ms`, `optimizer_ms`: a step that
    runs alone, and the optimizer's part of it."""

    way: str
    rate: float
    search: dict[float, float]
    each: dict[int, float]
    mean: float
    spread: float
    half_way: float
    step_ms: float
    optimizer_ms: float

    @property
    def at_an_end(self) -> bool:
        """Whether the best rate is the smallest or largest tried, so that others may be better."""
        return self.rate in (min(self.search), max(self.search))


def lines(searched: Sequence[Done], done: Sequence[Done], timed: Sequence[Done]) -> list[Line]:
    found: list[Line] = []
    for way in WAYS:
        runs = sorted((one for one in done if one.plan.way == way), key=lambda one: one.plan.seed)
        alone = next(one for one in timed if one.plan.way == way)
        last = [one.last for one in runs]
        found.append(
            Line(
                way=way,
                rate=runs[0].plan.rate,
                search={one.plan.rate: one.last for one in searched if one.plan.way == way},
                each={one.plan.seed: one.last for one in runs},
                mean=statistics.mean(last),
                spread=statistics.stdev(last) if len(last) > 1 else 0.0,
                half_way=statistics.mean(one.held_out[(len(one.held_out) - 1) // 2][1] for one in runs),
                step_ms=alone.seconds * 1e3,
                optimizer_ms=alone.optimizer * 1e3,
            )
        )
    return found


def table(found: Sequence[Line]) -> str:
    """Results by optimizer, then the losses of the search."""
    rows = [f"{'':12}{'rate':>9}{'half way':>10}{'in the end':>12}{'spread':>8}{'step ms':>9}{'optimizer ms':>14}"]
    rows += [
        f"{one.way:12}{one.rate:9.2g}{one.half_way:10.3f}{one.mean:12.3f}{one.spread:8.3f}"
        f"{one.step_ms:9.1f}{one.optimizer_ms:14.1f}"
        for one in found
    ]
    rows.append("held-out loss at equal tokens, mean over seeds; spread: standard deviation among them")
    for one in found:
        tried = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in sorted(one.search.items()))
        rows.append(f"{one.way}, search: {tried}{'; the best is at an end' if one.at_an_end else ''}")
    return "\n".join(rows)


def picture(done: Sequence[Done]) -> str:
    """Held-out loss by millions of tokens as SVG: a line for the mean over seeds, an area from least to largest."""
    curves = {way: [one.held_out for one in done if one.plan.way == way] for way in WAYS}
    points = [point for runs in curves.values() for run in runs for point in run]
    most = max(tokens for tokens, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    low, high = math.floor(low * 10) / 10, math.ceil(min(high, low * 2.5) * 10) / 10

    def place(tokens: float, loss: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * tokens / most
        y = 10 + (HEIGHT - BELOW - 10) * (high - min(loss, high)) / ((high - low) or 1.0)
        return f"{x:.1f},{y:.1f}"

    drawn = [*_axes(place, low, high, most), *_legend()]
    for way, runs in curves.items():
        steps = list(zip(*runs, strict=True))  # at each evaluation, (tokens, loss) of every seed
        tokens = [step[0][0] for step in steps]
        losses = [[loss for _, loss in step] for step in steps]
        up = [place(x, max(some)) for x, some in zip(tokens, losses, strict=True)]
        down = [place(x, min(some)) for x, some in zip(tokens, losses, strict=True)]
        middle = [place(x, statistics.mean(some)) for x, some in zip(tokens, losses, strict=True)]
        colour = COLOURS[way]
        drawn.append(f'<polygon points="{" ".join([*up, *reversed(down)])}" fill="{colour}" opacity="0.18"/>')
        drawn.append(f'<polyline points="{" ".join(middle)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}><title>Held-out loss by tokens</title>{"".join(drawn)}</svg>'


def _axes(place: Callable[[float, float], str], low: float, high: float, most: int) -> Iterator[str]:
    """Ticks and labels of both axes."""
    for i in range(6):
        loss, tokens = low + (high - low) * i / 5, most * i / 5
        (_, y), (x, _) = (place(*at).split(",") for at in ((0, loss), (tokens, low)))
        yield f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{loss:.2f}</text>'
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>'
        yield f'<text x="{x}" y="{HEIGHT - BELOW + 18}" text-anchor="middle">{tokens / 1e6:.2g}</text>'
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">million tokens; held-out loss</text>'


def _legend() -> Iterator[str]:
    for i, (way, colour) in enumerate(COLOURS.items()):
        yield f'<text x="{WIDTH - RIGHT - 10}" y="{30 + 20 * i}" text-anchor="end" fill="{colour}">{way}</text>'
