"""Faults of a program: for each place and kind, one small change of the text of one function, found by `ast`.

A change replaces as little as it can (an operator, a bound, a name), so that the style of the text does not tell where
it is. Not every fault shows: tests decide (make.py).
"""

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REMOVED_FUNCTION = "function removed"
_SYMBOLS = (
    "Eq == NotEq != Lt < Gt > LtE <= GtE >= Is is IsNot is_not In in NotIn not_in And and Or or Add + Sub - Mult * "
    "Div / FloorDiv // Mod % Pow ** BitAnd & BitOr | BitXor ^ LShift << RShift >>"
)
# Each operator, and what takes its place.
_OPERATORS = {
    "comparison": "== != != == < > > < <= >= >= <= is is_not is_not is in not_in not_in in",
    "boundary": "< <= <= < > >= >= >",
    "boolean operator": "and or or and",
    "arithmetic": "+ - - + * + / // // / % // ** *",
    "bits": "& | | & ^ & << >> >> <<",
}
_FUNCTIONS = (
    "min max any all lower upper startswith endswith lstrip rstrip append extend find rfind split rsplit floor"
    " ceil add discard keys values index count isdigit isalpha popleft pop sorted list"
)

Change = tuple[str, int, int, str]
"""Kind, begin and end in the text (bytes), and what stands there instead."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = ast.expr | ast.stmt | ast.keyword


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
    """Faults of a module's functions, and texts that are none. Nothing, where it is no Python in UTF-8."""
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

    def start(self, node: Node) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: Node) -> int:
        return self.starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    def of(self, node: Node) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def replace(self, kind: str, node: Node, new: str) -> Change:
        return kind, self.start(node), self.end(node), new

    def swap(self, kind: str, left: Node, right: Node) -> Change:
        between = self.source[self.end(left) : self.start(right)].decode()
        return kind, self.start(left), self.end(right), self.of(right) + between + self.of(left)

    def operator(self, left: ast.expr, op: ast.AST, right: ast.expr, suffix: str = "") -> Iterator[Change]:
        """Other operators between two operands. `suffix`: "=", of an update."""
        begin, gap = self.end(left), self.source[self.end(left) : self.start(right)].decode()
        symbol = _pairs(_SYMBOLS).get(type(op).__name__, "")
        for kind, pairs in _OPERATORS.items():
            old, new = f"{symbol}{suffix}".replace("_", " "), _pairs(pairs).get(symbol)
            if new and "#" not in gap and gap.isascii() and (place := begin + gap.find(old)) >= begin:
                yield "update" if suffix else kind, place, place + len(old), f"{new}{suffix}".replace("_", " ")


def _pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _functions(node: ast.stmt) -> Iterator[Function]:
    """The functions of a module or class, without those in functions."""
    if isinstance(node, Function):
        yield node
    elif isinstance(node, ast.ClassDef | ast.If | ast.Try):
        for each in node.body:
            yield from _functions(each)


def _changes(text: _Text, outer: Function) -> Iterator[tuple[Change, Function, tuple[int, str] | None]]:
    """Changes with the innermost function around each, and the place of a default."""
    body = outer.body[ast.get_docstring(outer, clean=False) is not None :]
    if body:
        removed = text.start(body[0]), text.end(body[-1]), "raise NotImplementedError"
        yield (REMOVED_FUNCTION, *removed), outer, None
    for place, default in enumerate(reversed(outer.args.defaults), start=1):
        for _, start, end, new in _of_constant(text, default):
            yield ("default", start, end, new), outer, (place, new)
    names = dict.fromkeys(each.arg for each in [*outer.args.posonlyargs, *outer.args.args])
    names |= {node.id: None for node in ast.walk(outer) if isinstance(node, ast.Name) and type(node.ctx) is ast.Store}
    fields = dict.fromkeys(node.attr for node in ast.walk(outer) if _is_field(node) and isinstance(node, ast.Attribute))
    left: list[tuple[ast.AST, Function]] = [(each, outer) for each in body]
    while left:
        node, inner = left.pop()
        if isinstance(node, ast.JoinedStr | ast.ClassDef):
            continue  # before Python 3.12 the places in formatted texts are wrong
        inner = node if isinstance(node, Function) else inner
        left += [(child, inner) for child in ast.iter_child_nodes(node)]
        for change in [*_of_node(text, node), *_of_name(text, node, names, fields)]:
            yield change, inner, None


def _of_node(text: _Text, node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.If(test=test) | ast.While(test=test):
            yield text.replace("condition negated", test, f"not ({text.of(test)})")
        case ast.Return(value=ast.expr() as value):
            yield text.replace("return dropped", value, "None")
            if isinstance(value, ast.Tuple) and len(value.elts) == 2:
                yield text.swap("results swapped", *value.elts)
        case ast.Raise():
            yield text.replace("raise removed", node, "pass")
        case ast.Break():
            yield text.replace("break to continue", node, "continue")
        case ast.Continue():
            yield text.replace("continue to break", node, "break")
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.Delete():
            yield text.replace("statement removed", node, "pass")
        case ast.AugAssign(target=target, op=op, value=value):
            yield from text.operator(target, op, value, "=")
            yield text.replace("update removed", node, "pass")
        case ast.For(iter=iterable):
            yield text.replace("first skipped", iterable, f"list({text.of(iterable)})[1:]")
        case ast.ExceptHandler(body=body):
            yield "handler removed", text.start(body[0]), text.end(body[-1]), "raise"
        case ast.Compare(left=left, ops=[op, *_], comparators=[right, *_]) | ast.BinOp(left=left, op=op, right=right):
            yield from text.operator(left, op, right)
        case ast.BoolOp(op=op, values=[left, right, *_]):
            yield from text.operator(left, op, right)
            yield "operand dropped", text.end(left), text.end(right), ""
        case ast.UnaryOp(operand=operand):
            yield "sign or not dropped", text.start(node), text.start(operand), ""
        case ast.IfExp(body=body, orelse=orelse):
            yield text.swap("branches swapped", body, orelse)
        case ast.Slice(lower=lower, upper=upper):
            bounds = [(bound, sign) for bound, sign in ((lower, "+"), (upper, "-")) if bound is not None]
            yield from (text.replace("slice bound", bound, f"{text.of(bound)} {sign} 1") for bound, sign in bounds)
        case ast.Call():
            yield from _of_call(text, node)
        case ast.Await(value=value):
            yield text.replace("await dropped", node, text.of(value))
        case ast.comprehension(iter=iterable, ifs=[*_, last]):
            yield "filter dropped", text.end(iterable), text.end(last), ""
        case ast.Constant():
            yield from _of_constant(text, node)
        case _:
            pass
    if isinstance(node, ast.If | ast.For | ast.While | ast.Try) and node.orelse:
        yield "else removed", text.start(node.orelse[0]), text.end(node.orelse[-1]), "pass"


def _of_call(text: _Text, node: ast.Call) -> Iterator[Change]:
    if len(node.args) >= 2 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
        yield text.swap("arguments swapped", *node.args[:2])
    if len(before := [*node.args, *node.keywords]) > 1 and node.keywords:
        yield "keyword dropped", text.end(before[-2]), text.end(before[-1]), ""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    functions = _pairs(_FUNCTIONS)
    if other := (functions | {new: old for old, new in functions.items()}).get(name):
        yield "function", text.end(node.func) - len(name), text.end(node.func), other
    if isinstance(node.func, ast.Attribute) and not before:
        yield text.replace("call dropped", node, text.of(node.func.value))
    elif name == "range" and node.args:
        yield text.replace("range bound", node.args[-1], f"{text.of(node.args[-1])} - 1")


def _of_name(text: _Text, node: ast.AST, names: dict[str, None], fields: dict[str, None]) -> Iterator[Change]:
    """Another name of the same kind: the next one, in the order of their first appearance."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        yield text.replace("variable", node, _next(list(names), node.id))
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_field(node):
        yield "attribute", text.end(node) - len(node.attr.encode()), text.end(node), _next(list(fields), node.attr)


def _is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _next(names: Sequence[str], name: str) -> str:
    return names[(names.index(name) + 1) % len(names)]


def _of_constant(text: _Text, node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.Constant(value=bool() as value):
            yield text.replace("flag", node, str(not value))
        case ast.Constant(value=int() as value):
            yield text.replace("constant", node, str(value + 1))
        case ast.Constant(value=str() as value) if len(value) > 1 and "\\" not in value and text.of(node)[0] in "'\"":
            yield text.replace("text", node, text.of(node)[0] + text.of(node)[2:])
        case _:
            pass
