"""The table of an op: every implementation has the functions that the op calls, under its names."""

import ast
import importlib
from pathlib import Path

import pytest
import torch

import glm5.kernels
from glm5.kernels.dispatch import TABLES

FOLDER = Path(glm5.kernels.__file__).parent
OPS = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py") if "Table(" in path.read_text(encoding="utf-8"))


def called_functions(op: str) -> dict[str, set[str]]:
    """By implementation, "impl" for all: functions that an op takes from the file which its table names."""
    nodes = list(ast.walk(ast.parse((FOLDER / op / "__init__.py").read_text(encoding="utf-8"))))
    kept = {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and _is_choice(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            chosen = kept.get(node.value.id) if isinstance(node.value, ast.Name) else node.value
            if _is_choice(chosen):
                found.setdefault(ast.unparse(chosen.args[0]).strip("'"), set()).add(node.attr)
    return found


def _is_choice(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "TABLE.module"


@pytest.mark.parametrize("op", OPS)
def test_every_implementation_has_what_the_op_calls(op):
    importlib.import_module(f"glm5.kernels.{op}")
    called, table = called_functions(op), TABLES[op]
    assert called
    for impl in table.impls:
        module = table.module(impl, torch.empty(0))
        names = called.get("impl", set()) | called.get(impl, set())
        missing = sorted(name for name in names if not callable(getattr(module, name, None)))
        assert not missing, f"{op}: {module.__name__} lacks {missing}"
