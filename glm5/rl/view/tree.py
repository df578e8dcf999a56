"""The tree of a rollout as SVG: to the right a conversation grows, and each branch (a history that was edited or
compacted, a retry, a sub-agent) has a row of its own, joined to the segment that it follows.
"""

import html
from collections.abc import Callable

from glm5.rl.records.trace import Node, Trace

MOST_ROWS = 200
_WIDTH, _ROW, _HEIGHT, _LEAST = 640, 26, 18, 2.0
_LABELLED = 30  # pixels from which on a segment says its number of tokens


def tree(trace: Trace, address: Callable[[int, int], str]) -> str:
    """A figure. `address(segment, token)`: of a segment's text, which begins at that token of all."""
    nodes = trace.nodes
    if len(nodes) < 2:
        return ""
    rows, begins = _places(nodes)
    scale = _WIDTH / max(1, *(begin + len(node.token_ids) for begin, node in zip(begins, nodes, strict=True)))
    parts, token = list[str](), 0
    for number, (node, row, begin) in enumerate(zip(nodes, rows, begins, strict=True)):
        if row < MOST_ROWS:
            x, y, width = begin * scale, row * _ROW, max(_LEAST, len(node.token_ids) * scale - 1)
            if node.parent is not None and node.parent < number and rows[node.parent] != row:
                top = rows[node.parent] * _ROW + _HEIGHT
                parts.append(f'<line class="branch" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{y}"/>')
            label = f'<text x="{x + 4:.1f}" y="{y + 13}">{len(node.token_ids):,}</text>' if width > _LABELLED else ""
            parts.append(
                f'<a href="{html.escape(address(number, token))}"><rect class="node {_kind(node)}" x="{x:.1f}" y="{y}" '
                f'width="{width:.1f}" height="{_HEIGHT}"><title>{html.escape(_facts(number, node))}</title></rect>'
                f"{label}</a>"
            )
        token += len(node.token_ids)
    num_rows = max(rows) + 1
    left = f", {num_rows - MOST_ROWS:,} more are not drawn" if num_rows > MOST_ROWS else ""
    keys = "".join(f'<span class="{one}">{one}</span>' for one in ("context", "trained", "untrained"))
    box = f"0 0 {_WIDTH} {min(num_rows, MOST_ROWS) * _ROW}"
    return (
        f'<div class="card"><figure><svg class="tree" viewBox="{box}" role="img" aria-label="segments of the rollout">'
        f"{''.join(parts)}</svg><figcaption>{keys}{len(nodes):,} segments, branches: {num_rows:,}{left}</figcaption>"
        "</figure></div>"
    )


def _places(nodes: list[Node]) -> tuple[list[int], list[int]]:
    """Of each segment its row, and the tokens before it on its path. A first child goes on in its parent's row."""
    rows, begins, followed, num_rows = list[int](), list[int](), set[int](), 0
    for number, node in enumerate(nodes):
        parent = node.parent if node.parent is not None and node.parent < number else None
        if parent is None or parent in followed:
            rows.append(num_rows)
            num_rows += 1
        else:
            rows.append(rows[parent])
        if parent is not None:
            followed.add(parent)
        begins.append(0 if parent is None else begins[parent] + len(nodes[parent].token_ids))
    return rows, begins


def _kind(node: Node) -> str:
    return "context" if not node.sampled else "untrained" if node.masked is None or all(node.masked) else "trained"


def _facts(number: int, node: Node) -> str:
    kind = "context" if not node.sampled else "sampled, trained" if _kind(node) == "trained" else "sampled, not trained"
    versions = sorted({min(node.versions), max(node.versions)}) if node.versions else []
    of = f", weights of version {' to '.join(map(str, versions))}" if versions else ""
    after = "" if node.parent is None else f", after segment {node.parent}"
    return f"segment {number}{after}: {len(node.token_ids):,} tokens, {kind}{of}"
