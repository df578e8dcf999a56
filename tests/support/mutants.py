"""Broken variants of a module: each differs in one place from its source, as a slip of the programmer would.

A comparison is turned or shifted by one, a condition negated, `and` becomes `or`, a sum a difference, `min` becomes
`max`, a number grows by one, and a statement that stands alone is left out.
"""

import ast
import copy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COUNTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}
_NAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutants(path: Path) -> Iterator[tuple[str, ModuleType]]:
    """Each variant of the module in `path`, with what is other in it."""
    tree = ast.parse(path.read_text())
    decorators = {
        id(one) for node in ast.walk(tree) for each in getattr(node, "decorator_list", ()) for one in ast.walk(each)
    }
    for number, node in enumerate(ast.walk(tree)):
        for name, change in () if id(node) in decorators else _changes(node):
            other = copy.deepcopy(tree)
            target = next(one for index, one in enumerate(ast.walk(other)) if index == number)
            change(target)
            module = ModuleType(path.stem)
            module.__dict__["__name__"] = path.stem
            sys.modules[path.stem] = module  # dataclasses look there
            exec(compile(ast.fix_missing_locations(other), str(path), "exec"), module.__dict__)
            line = ast.unparse(_statement(tree, node)).splitlines()[0]
            yield f"{path.name}:{getattr(node, 'lineno', 0)}: {name}: {line}", module


def _statement(tree: ast.AST, node: ast.AST) -> ast.AST:
    """The innermost statement that holds the node."""
    found: ast.AST = node
    for one in ast.walk(tree):
        if isinstance(one, ast.stmt) and any(child is node for child in ast.walk(one)):
            found = one
    return found


def _changes(node: ast.AST):
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            yield f"{type(op).__name__} turned", lambda one: setattr(one, "ops", [_COMPARED[type(one.ops[0])]()])
        case ast.BoolOp():
            yield "and, or", lambda one: setattr(one, "op", ast.Or() if isinstance(one.op, ast.And) else ast.And())
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _COUNTED:
            yield "other sign", lambda one: setattr(one, "op", _COUNTED[type(one.op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield (
                "not left out",
                lambda one: (
                    setattr(one, "op", ast.Not()) or setattr(one, "operand", ast.UnaryOp(ast.Not(), one.operand))
                ),
            )
        case ast.Name(id=name) if name in _NAMED:
            yield f"{_NAMED[name]} for {name}", lambda one: setattr(one, "id", _NAMED[one.id])
        case ast.Constant(value=bool()):
            yield "other truth", lambda one: setattr(one, "value", not one.value)
        case ast.Constant(value=int()):
            yield "one more", lambda one: setattr(one, "value", one.value + 1)
        case ast.If():
            yield "condition negated", lambda one: setattr(one, "test", ast.UnaryOp(ast.Not(), one.test))
        case ast.FunctionDef(body=body):
            for place, statement in enumerate(body):
                is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if isinstance(statement, ast.Expr | ast.AugAssign | ast.Delete | ast.If | ast.For) and not is_text:
                    yield f"left out: {ast.unparse(statement).splitlines()[0]}", _without(place)
        case ast.For(body=body) | ast.While(body=body):
            for place, statement in enumerate(body):
                if isinstance(statement, ast.Expr | ast.AugAssign | ast.Delete):
                    yield f"left out: {ast.unparse(statement).splitlines()[0]}", _without(place)


def _without(place: int):
    def change(one) -> None:
        one.body[place] = ast.Pass()

    return change


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """TimeoutError in the block where it takes more processor time: some variants have no end."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
