"""Faults of a program: for each place and kind, one small change of the text of one function, found by `ast`.

A change replaces as little as it can (an operator, a bound, a name), so that the style of the text does not tell where
it is. What does not compile or means the same is left out. Not every fault shows: tests decide (make.py).
"""

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISON: dict[type[ast.AST], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">"),
    ast.Gt: (">", "<"),
    ast.LtE: ("<=", ">="),
    ast.GtE: (">=", "<="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
BOUNDARY: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}
ARITHMETIC: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "//"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
}
BITS: dict[type[ast.AST], tuple[str, str]] = {
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_PAIRS = (
    "min max|any all|lower upper|startswith endswith|lstrip rstrip|append extend|find rfind|split rsplit|floor ceil"
)
_PAIRS += "|add discard|keys values|index count|isdigit isalpha|popleft pop|insert append|get pop|sorted list"
FUNCTIONS = dict(pair.split() for pair in _PAIRS.split("|")) | dict(pair.split()[::-1] for pair in _PAIRS.split("|"))
REMOVED_FUNCTION = "function removed"
ERROR = "raise NotImplementedError"

Change = tuple[str, int, int, str]
"""Kind, begin and end in the text (bytes), and what stands there instead."""


@dataclass(frozen=True)
class Mutation:
    """A change, and what is needed to try it in a running program. `first_line`: of the outermost function around it,
    with its decorators; `covered_line`: of the innermost; `block`: begin and end of the statement of the module.
    `default`: for an argument's default, its place from the last one, and its new text."""

    kind: str
    start: int
    end: int
    text: str
    first_line: int
    covered_line: int
    block: tuple[int, int]
    block_line: int
    default: tuple[int, str] | None = None

    def changed(self, source: bytes) -> str:
        """The statement with the change; "" where that is no other program."""
        start, end = self.block
        old, new = source[start:end], source[start : self.start] + self.text.encode() + source[self.end : end]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(new, "", "exec")
            return new.decode() if ast.dump(ast.parse(old)) != ast.dump(ast.parse(new)) else ""
        except (ValueError, SyntaxError, RecursionError):
            return ""


def mutations(source: bytes) -> Iterator[Mutation]:
    """Every fault of a module's functions, and texts that are none. Nothing, where it is no Python in UTF-8."""
    try:
        tree = ast.parse(source.decode())
    except (ValueError, SyntaxError, RecursionError):
        return
    text = _Text(source)
    for block in tree.body:
        around = text.starts[_first_line(block) - 1], text.end(block)
        for outer in _functions(block):
            for change, inner, default in _changes(text, outer):
                yield Mutation(*change, _first_line(outer), _first_line(inner), around, _first_line(block), default)


class _Text:
    """Where the nodes of a source are, in bytes."""

    def __init__(self, source: bytes) -> None:
        self.source, self.starts = source, [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self.starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    def of(self, node: ast.expr) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def replace(self, kind: str, node: ast.expr | ast.stmt, new: str) -> Change:
        return kind, self.start(node), self.end(node), new

    def operator(self, kind: str, left: ast.expr, right: ast.expr, pair: tuple[str, str] | None) -> Iterator[Change]:
        """Another operator between two operands."""
        begin, gap = self.end(left), self.source[self.end(left) : self.start(right)]
        if pair is not None and b"#" not in gap and (place := gap.find(pair[0].encode())) >= 0:
            yield kind, begin + place, begin + place + len(pair[0]), pair[1]


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _functions(node: ast.stmt) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a module or class, without those in functions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    elif isinstance(node, ast.ClassDef | ast.If | ast.Try):
        for each in node.body:
            yield from _functions(each)


def _changes(text: _Text, outer: ast.FunctionDef | ast.AsyncFunctionDef):
    """Changes with the innermost function around each, and the place of a default."""
    has_docstring = ast.get_docstring(outer, clean=False) is not None
    if body := outer.body[has_docstring:]:
        yield (REMOVED_FUNCTION, text.start(body[0]), text.end(body[-1]), ERROR), outer, None
    defaults = outer.args.defaults
    for place, default in enumerate(defaults):
        for _, start, end, new in _constants(text, default):
            yield ("default", start, end, new), outer, (len(defaults) - place, new)
    names = dict.fromkeys(each.arg for each in [*outer.args.posonlyargs, *outer.args.args])
    names |= {n.id: None for n in ast.walk(outer) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    fields = dict.fromkeys(node.attr for node in ast.walk(outer) if _is_field(node) and isinstance(node, ast.Attribute))
    around: list[tuple[ast.AST, ast.FunctionDef | ast.AsyncFunctionDef]] = [(each, outer) for each in body]
    while around:
        node, inner = around.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = node
        elif isinstance(node, ast.JoinedStr | ast.ClassDef):
            continue  # before Python 3.12 the places in formatted texts are wrong
        around += [(child, inner) for child in ast.iter_child_nodes(node)]
        for change in [*_of_statement(text, node), *_of_expression(text, node), *_of_name(text, node, names, fields)]:
            yield change, inner, None


def _of_statement(text: _Text, node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.If(test=test) | ast.While(test=test):
            yield text.replace("condition negated", test, f"not ({text.of(test)})")
        case ast.Return(value=ast.expr() as value):
            yield text.replace("return dropped", value, "None")
            if isinstance(value, ast.Tuple) and len(value.elts) == 2:
                yield _swapped(text, "results swapped", *value.elts)
        case ast.Raise():
            yield text.replace("raise removed", node, "pass")
        case ast.Break():
            yield text.replace("break to continue", node, "continue")
        case ast.Continue():
            yield text.replace("continue to break", node, "break")
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.Delete():
            yield text.replace("statement removed", node, "pass")
        case ast.AugAssign(target=target, op=op, value=value):
            pair = (ARITHMETIC | BITS).get(type(op))
            yield from text.operator("update", target, value, pair and (f"{pair[0]}=", f"{pair[1]}="))
            yield text.replace("update removed", node, "pass")
        case ast.For(iter=iterable):
            yield text.replace("first skipped", iterable, f"list({text.of(iterable)})[1:]")
        case ast.ExceptHandler(body=body):
            yield "handler removed", text.start(body[0]), text.end(body[-1]), "raise"
        case _:
            pass
    if isinstance(node, ast.If | ast.For | ast.While | ast.Try) and node.orelse:
        yield "else removed", text.start(node.orelse[0]), text.end(node.orelse[-1]), "pass"


def _of_expression(text: _Text, node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=[op, *_], comparators=[right, *_]):
            yield from text.operator("comparison", left, right, COMPARISON[type(op)])
            yield from text.operator("boundary", left, right, BOUNDARY.get(type(op)))
        case ast.BoolOp(op=op, values=[left, right, *_]):
            pair = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            yield from text.operator("boolean operator", left, right, pair)
            yield "operand dropped", text.end(left), text.end(right), ""
        case ast.BinOp(left=left, op=op, right=right):
            yield from text.operator("arithmetic", left, right, ARITHMETIC.get(type(op)))
            yield from text.operator("bits", left, right, BITS.get(type(op)))
        case ast.UnaryOp(operand=operand):
            yield "sign or not dropped", text.start(node), text.start(operand), ""
        case ast.IfExp(body=body, orelse=orelse):
            yield _swapped(text, "branches swapped", body, orelse)
        case ast.Slice(lower=lower, upper=upper):
            for bound, shift in ((lower, "+"), (upper, "-")):
                if bound is not None:
                    yield text.replace("slice bound", bound, f"{text.of(bound)} {shift} 1")
        case ast.Call():
            yield from _of_call(text, node)
        case ast.Await(value=value):
            yield text.replace("await dropped", node, text.of(value))
        case ast.comprehension(iter=iterable, ifs=[*_, last]):
            yield "filter dropped", text.end(iterable), text.end(last), ""
        case ast.Constant():
            yield from _constants(text, node)
        case _:
            pass


def _of_call(text: _Text, node: ast.Call) -> Iterator[Change]:
    if len(node.args) >= 2 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
        yield _swapped(text, "arguments swapped", *node.args[:2])
    if node.keywords and (before := [*node.args, *node.keywords][-2:-1]):
        yield "keyword dropped", text.end(before[0]), text.end(node.keywords[-1]), ""
    match node.func:
        case ast.Name(id="range"):
            yield text.replace("range bound", node.args[-1], f"{text.of(node.args[-1])} - 1")
        case ast.Attribute(value=value, attr=name):
            if name in FUNCTIONS:
                yield "function", text.end(node.func) - len(name), text.end(node.func), FUNCTIONS[name]
            if not node.args and not node.keywords:
                yield text.replace("call dropped", node, text.of(value))
        case ast.Name(id=name) if name in FUNCTIONS:
            yield text.replace("function", node.func, FUNCTIONS[name])
        case _:
            pass


def _of_name(text: _Text, node: ast.AST, names: dict[str, None], fields: dict[str, None]) -> Iterator[Change]:
    """Another name of the same kind: the next one, in the order of their first appearance."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        yield text.replace("variable", node, _next(list(names), node.id))
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_field(node):
        yield "attribute", text.end(node) - len(node.attr.encode()), text.end(node), _next(list(fields), node.attr)


def _is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _next(names: list[str], name: str) -> str:
    return names[(names.index(name) + 1) % len(names)]


def _swapped(text: _Text, kind: str, left: ast.expr, right: ast.expr) -> Change:
    between = text.source[text.end(left) : text.start(right)].decode()
    return kind, text.start(left), text.end(right), text.of(right) + between + text.of(left)


def _constants(text: _Text, node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.Constant(value=bool() as value):
            yield text.replace("flag", node, str(not value))
        case ast.Constant(value=int() as value):
            yield text.replace("constant", node, str(value + 1))
        case ast.Constant(value=str() as value) if len(value) > 1 and "\\" not in value and text.of(node)[0] in "'\"":
            new = text.of(node)
            yield text.replace("text", node, new[0] + new[2:])
        case _:
            pass
