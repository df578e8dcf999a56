"""Values of tool arguments: from the text that a model wrote to JSON, as the function's schema has it.

    only a string allowed    the text as it is, whatever it looks like
    otherwise                the first reading of the text that the schema admits
    none admitted            the text as a string if strings are allowed, else its first reading, else the text

Readings, in order: the text as JSON; the text un-escaped once and then as JSON; the text as a Python
literal. A quoted number is read as a number where numbers but no strings are allowed. Where strings are
allowed, too, only the JSON of something else is un-escaped and Python is not tried. Where the schema
says nothing: JSON, or digits grouped with underscores, else the text.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from glm5.chat.schema import Node, Schema

MAX_LITERAL = 1 << 16
"""Characters of text that are tried as a Python literal, whose parser takes memory in plenty."""
_TEXT = frozenset({"string"})
_GROUPED_DIGITS = re.compile(r"-?\d+(_\d+)+")


class Arguments:
    """How to read the arguments of one function.

    `depend_on_each_other`: the types of some depend on the values of others (a union of objects), so
    that none can be read before all are there.
    """

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        self._schema = Schema(parameters)
        self._ways = [
            {key: _all_of(schemas) for key, schemas in way.items()} for way in self._schema.alternatives(parameters)
        ]
        self._nodes: dict[str, Node] = {}
        for key in {key for way in self._ways for key in way}:
            nodes = [way[key] for way in self._ways if key in way]
            self._nodes[key] = nodes[0] if len(nodes) == 1 else {"anyOf": nodes}

    @cached_property
    def depend_on_each_other(self) -> bool:
        return any(len({self._schema.types(way[key]) for way in self._ways if key in way}) > 1 for key in self._nodes)

    def is_text(self, key: str) -> bool:
        """Whether the value can only be a string, so that it is known before it is complete."""
        return self._schema.types(self._nodes.get(key)) == _TEXT

    def read(self, key: str, text: str) -> str:
        """JSON of one value."""
        return self._read(self._nodes.get(key), text)[0]

    def read_all(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """JSON of all values of a call, under the first alternative that admits them all, or most of them."""
        readings = [[self._read(way.get(key), text) for key, text in pairs] for way in self._ways]
        best = max(readings, key=lambda reading: sum(admitted for _, admitted in reading))
        return [value for value, _ in best]

    def _read(self, node: Node, text: str) -> tuple[str, bool]:
        """JSON of a value, and whether the schema admits it."""
        types = self._schema.types(node)
        if types == _TEXT:
            return dump(text), self._schema.admits(node, text)
        first = None
        for value, written in _readings(text, types):
            if self._schema.admits(node, value):
                return written, True
            first = first or written
        if first is None or types is None or "string" in types:
            return dump(text), self._schema.admits(node, text)
        return first, False


def dump(value: Any) -> str:
    """JSON with text as it is; escaped only where it holds half of a surrogate pair, which has no UTF-8 form."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return written if written.isascii() or _has_utf8(written) else json.dumps(value, allow_nan=False)


def _readings(text: str, types: frozenset[str] | None) -> Iterator[tuple[Any, str]]:
    """Values that the text may stand for, each with its JSON."""
    numbers = types is not None and "string" not in types and bool(types & {"integer", "number"})
    if found := _from_json(text):
        if numbers:
            yield from _quoted_number(found[0], types)
        yield found
    if types is None:
        if _GROUPED_DIGITS.fullmatch(text):
            yield from _from_python(text)
        return
    if "\\" in text and (found := _from_escaped_json(text)):
        if numbers:
            yield from _quoted_number(found[0], types)
        if "string" not in types or not isinstance(found[0], str):
            yield found
    if "string" not in types:
        for value, written in _from_python(text):
            if numbers:
                yield from _quoted_number(value, types)
            yield value, written


def _from_json(text: str) -> tuple[Any, str] | None:
    try:
        return json.loads(text, parse_constant=_refuse), text.strip()
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _from_escaped_json(text: str) -> tuple[Any, str] | None:
    outer = _from_json(f'"{text}"')
    return _from_json(outer[0]) if outer and _has_utf8(outer[0]) else None


def _from_python(text: str) -> Iterator[tuple[Any, str]]:
    if len(text) > MAX_LITERAL:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" is kept as it is; that Python would rather see "\\d" is no matter
            written = dump(ast.literal_eval(text.strip()))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return
    yield json.loads(written), written


def _quoted_number(value: Any, types: frozenset[str] | None) -> Iterator[tuple[Any, str]]:
    """A number that was written as a string: with a fraction only where the schema has "number"."""
    if not isinstance(value, str):
        return
    whole = types is not None and "number" not in types
    try:
        number = int(value) if whole or not re.search(r"[.eE]", value) else float(value)
    except ValueError:
        return
    if math.isfinite(number):
        yield number, dump(number)


def _has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _all_of(schemas: Sequence[Node]) -> Node:
    return schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)}
