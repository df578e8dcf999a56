"""Curves as SVG within HTML: figures with axes, without scripts."""

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

Curve = Sequence[tuple[float, float]]
WIDTH, HEIGHT, MOST_POINTS = 640, 220, 1000
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 24, 38
"""Around the curves, for ticks and labels."""
STYLE = """svg { width: 100%; background: #fafafa } figcaption span { margin-right: 1rem } figure { margin: 1.5rem 0 }
polyline { fill: none; stroke-width: 1.5; stroke: currentColor } .curve-0 { color: #1f5fbf } .curve-1 { color: #c2410c }
.curve-2 { color: #1d7548 } .curve-3 { color: #9b2f6b } .curve-4 { color: #6a4fb0 }
.mark { stroke: #bbb; stroke-dasharray: 4 } .grid { stroke: #e4e4e4 } .plot text { font-size: 11px; fill: #555 }"""
"""For a page of its own; a page with other colours sets the same classes."""
_TICKS = 5  # about as many, on either axis
_MANTISSAS = (1, 2, 5, 10)


def plot(
    curves: Mapping[str, Curve], total: float, marks: Sequence[float] = (), *, x: str = "step", y: str = ""
) -> str:
    """A figure of up to five curves over x from 0 to `total`, thinned to MOST_POINTS points each; empty without points.

    `marks`: x of dashed lines. `x`, `y`: what the axes count; `y` is the unit of what the curves are named for.
    """
    curves = {name: _thinned(points) for name, points in curves.items() if points}
    if not curves:
        return ""
    values = [value for points in curves.values() for _, value in points]
    low, high = min(values), max(values)
    span = (high / 2 - low / 2) or 1.0  # halves, whose difference is a number

    def place(at: float, value: float) -> tuple[float, float]:
        share = ((value / 2 - low / 2) / span) if high > low else 0.5
        return LEFT + (WIDTH - LEFT - RIGHT) * at / total, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    names = ", ".join(curves)
    lines = [*_across(low, high, place), *_along(total, place)]
    lines.append(f'<text x="4" y="14">{html.escape(f"{names} ({y})" if y else names)}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{html.escape(x)}</text>')
    lines += [
        f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        for mark in marks
        if mark and (at := place(mark, low)[0])
    ]
    captions: list[str] = []
    for number, (name, points) in enumerate(curves.items()):
        coordinates = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        lines.append(f'<polyline class="curve-{number}" points="{coordinates}"/>')
        captions.append(f'<span class="curve-{number}">{html.escape(name)}, last {points[-1][1]:.4g}</span>')
    about = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(f"{names} by {x}")}"'
    return (
        f'<figure><svg class="plot" {about}>{"".join(lines)}</svg>'
        f"<figcaption>{''.join(captions)}from {low:.4g} to {high:.4g}</figcaption></figure>"
    )


def _across(low: float, high: float, place: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    """Lines and numbers of the y axis."""
    for tick, text in ticks(low, high):
        y = place(0, tick)[1]
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'


def _along(total: float, place: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    """Numbers of the x axis."""
    bottom = HEIGHT - BOTTOM
    for tick, text in ticks(0, total, least=1):
        x = place(tick, 0)[0]
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'


def ticks(low: float, high: float, least: float = 0) -> list[tuple[float, str]]:
    """Round numbers from `low` to `high`, about _TICKS and `least` or more apart, with texts that tell them apart;
    `low` itself where there is none."""
    raw = (high / _TICKS - low / _TICKS) if math.isfinite(high) and math.isfinite(low) else math.nan
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 0.0
    if not 0 < power < math.inf:
        return [(one, f"{one:.4g}") for one in dict.fromkeys((low, high))]
    step = max(least, next((power * mantissa for mantissa in _MANTISSAS if power * mantissa >= raw), raw))
    found = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    is_plain = digits <= 5 and max(abs(low), abs(high)) < 1e7
    return [(one, f"{one:,.{digits}f}" if is_plain else f"{one:.6g}") for one in found] or ticks(low, low)


def _thinned(points: Curve) -> Curve:
    every = -(-len(points) // MOST_POINTS)
    return points[::every] if every > 1 else points
