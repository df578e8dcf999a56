"""The tree of a rollout as SVG: to the right a conversation grows, and each branch (a history that was edited or
compacted, a retry, a sub-agent) has a row of its own, joined to the segment that it follows.
"""

from collections.abc import Callable

from glm5.rl.records.trace import Node, Trace
from glm5.rl.view.render import render

MOST_ROWS = 200
_SIZES = {"width": 640, "row": 26, "height": 18, "labelled": 30}
"""In pixels. `labelled`: from this width on, a segment says its number of tokens."""


def tree(trace: Trace, address: Callable[[int, int], str]) -> str:
    """A figure. `address(segment, token)`: of a segment's text, which begins at that token of all."""
    nodes = trace.nodes
    if len(nodes) < 2:
        return ""
    rows, begins = _places(nodes)
    scale = _SIZES["width"] / max(1, *(begin + len(node.token_ids) for begin, node in zip(begins, nodes, strict=True)))
    segments, token = list[dict[str, object]](), 0
    for number, (node, row, begin) in enumerate(zip(nodes, rows, begins, strict=True)):
        count, parent = len(node.token_ids), node.parent
        if row < MOST_ROWS:
            above = rows[parent] if parent is not None and parent < number and rows[parent] != row else None
            place = {"row": row, "above": above, "x": begin * scale, "width": max(2.0, count * scale - 1)}
            segments.append({"number": number, "node": node, "target": address(number, token), **place})
        token += count
    num_rows = max(rows) + 1
    return render(
        "tree", segments=segments, num_segments=len(nodes), num_rows=num_rows, most_rows=MOST_ROWS, sizes=_SIZES
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
