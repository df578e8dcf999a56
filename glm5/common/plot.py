"""Curves as SVG within HTML: figures without scripts."""

import html
from collections.abc import Mapping, Sequence

Curve = Sequence[tuple[float, float]]
WIDTH, HEIGHT, MOST_POINTS = 640, 180, 1000
STYLE = """svg { width: 100%; background: #fafafa } figcaption span { margin-right: 1rem } figure { margin: 1.5rem 0 }
polyline { fill: none; stroke-width: 1.5; stroke: currentColor } .curve-0 { color: #1f5fbf } .curve-1 { color: #c2410c }
.curve-2 { color: #1d7548 } .curve-3 { color: #9b2f6b } .curve-4 { color: #6a4fb0 }
.mark { stroke: #bbb; stroke-dasharray: 4 }"""
"""For a page of its own; a page with other colours sets the same classes."""


def plot(curves: Mapping[str, Curve], total: float, marks: Sequence[float] = ()) -> str:
    """A figure of up to five curves over x from 0 to `total`, thinned to MOST_POINTS points each; empty without points.
    `marks`: x of dashed lines."""
    curves = {name: _thinned(points) for name, points in curves.items() if points}
    if not curves:
        return ""
    values = [value for points in curves.values() for _, value in points]
    low, high = min(values), max(values)
    span = (high / 2 - low / 2) or 1.0  # halves, whose difference is a number
    lines = [
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}"/>'
        for mark in marks
        if mark and (x := WIDTH * mark / total)
    ]
    captions: list[str] = []
    for number, (name, points) in enumerate(curves.items()):
        coordinates = " ".join(
            f"{WIDTH * x / total:.1f},{HEIGHT - 4 - (HEIGHT - 8) * ((value / 2 - low / 2) / span):.1f}"
            for x, value in points
        )
        lines.append(f'<polyline class="curve-{number}" points="{coordinates}"/>')
        captions.append(f'<span class="curve-{number}">{html.escape(name)}, last {points[-1][1]:.4g}</span>')
    label = html.escape(", ".join(curves))
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label} by step">{"".join(lines)}</svg>'
        f"<figcaption>{''.join(captions)}from {low:.4g} to {high:.4g}</figcaption></figure>"
    )


def _thinned(points: Curve) -> Curve:
    every = -(-len(points) // MOST_POINTS)
    return points[::every] if every > 1 else points
