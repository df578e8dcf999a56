"""`python -O` leaves asserts out, and everything else goes on: no assert in glm5 does anything that is needed."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "glm5"
EFFECTS = {
    "add", "append", "clear", "close", "discard", "extend", "get_nowait", "next", "open", "pop", "popleft", "put",
    "read", "readline", "recv", "release", "remove", "send", "setdefault", "unlink", "update", "wait", "write",
}  # fmt: skip


def effects(source: str) -> list[str]:
    """What asserts do beside looking."""
    asserts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    return [ast.unparse(node) for one in asserts for node in ast.walk(one) if _has_effect(node)]


def _has_effect(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        return name.rstrip("_") in EFFECTS or (name.endswith("_") and not name.startswith("_"))
    return isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)


def test_nothing_needed_is_done_in_an_assert():
    found = {str(path.relative_to(ROOT)): does for path in ROOT.rglob("*.py") if (does := effects(path.read_text()))}
    assert not found, f"python -O leaves these out: {found}"


@pytest.mark.parametrize(
    "source",
    ["assert next(rows, None) is None", "assert (n := f())", "assert lock.release()", "assert x.copy_(y) is x"],
)
def test_the_test_notices(source):
    assert effects(source)
