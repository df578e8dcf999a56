"""Converts tool arguments from the text that a model wrote to JSON, guided by the function's schema.

    only strings allowed     the text as it is
    otherwise                the first reading of the text that fits the schema
    no reading fits          the text as a string if strings are allowed, else its first reading, else the text

Readings, in order: the text as JSON; the text un-escaped once and then as JSON; the text as a Python
literal. A quoted number is read as a number where numbers but no strings are allowed. Where strings are
allowed, too, un-escaped JSON must not be a string, and Python literals are not tried. Without a type in the
schema: JSON, else the text.
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
from glm5.common.budget import Budget

MAX_LITERAL = 1 << 16
"""Longest text that is tried as a Python literal: the parser needs much memory."""
_TEXT = frozenset({"string"})


class Arguments:
    """Converts the arguments of one function. `owner` names it in errors. The schema is analysed here, once; raises
    RequestError if that exceeds the budget.

    `depend_on_each_other`: the types of some arguments depend on the values of others (a union of
    objects), so they can only be converted together.
    """

    def __init__(
        self, parameters: Mapping[str, Any] | None, owner: str = "the parameters", budget: Budget | None = None
    ) -> None:
        self._schema = Schema(parameters, owner, budget)
        self._ways = [
            {key: _all_of(schemas) for key, schemas in way.items()} for way in self._schema.alternatives(parameters)
        ]
        self._nodes: dict[str, Node] = {}
        for key in dict.fromkeys(key for way in self._ways for key in way):
            nodes = list({id(way[key]): way[key] for way in self._ways if key in way}.values())
            self._nodes[key] = nodes[0] if len(nodes) == 1 else {"anyOf": nodes}
        self._types = {key: self._schema.types(node) for key, node in self._nodes.items()}
        self.depend_on_each_other = any(
            len({self._schema.types(way[key]) for way in self._ways if key in way}) > 1 for key in self._nodes
        )

    def is_text(self, key: str) -> bool:
        """Whether the value can only be a string, so that it can be streamed before it is complete."""
        return self._types.get(key) == _TEXT

    def read(self, key: str, text: str) -> str:
        """JSON of one value."""
        return self._read(self._nodes.get(key), _Value(text))[0]

    def read_all(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """JSON of all values of a call, by the first alternative that fits most of them."""
        values = [(key, _Value(text)) for key, text in pairs]
        readings = [[self._read(way.get(key), value) for key, value in values] for way in self._ways]
        best = max(readings, key=lambda reading: sum(admitted for _, admitted in reading))
        return [value for value, _ in best]

    def _read(self, node: Node, value: "_Value") -> tuple[str, bool]:
        """JSON of a value, and whether it fits the schema."""
        types, text = self._schema.types(node), value.text
        if types == _TEXT:
            return dump(text), self._admits(node, value, text, dump(text))
        first = None
        for read, written in _readings(value, types):
            if self._admits(node, value, read, written):
                return written, True
            first = first or written
        if first is None or types is None or "string" in types:
            return dump(text), self._admits(node, value, text, dump(text))
        return first, False

    def _admits(self, node: Node, value: "_Value", read: Any, written: str) -> bool:
        return self._schema.admits(node, read, value.admitted.setdefault(written, {}))


class _Value:
    """The text of one value, with its readings cached. `admitted`: for the JSON of each reading, the schemas that it
    fits."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.admitted: dict[str, dict[int, bool]] = {}

    @cached_property
    def from_json(self) -> tuple[Any, str] | None:
        return _from_json(self.text)

    @cached_property
    def from_escaped_json(self) -> tuple[Any, str] | None:
        return _from_escaped_json(self.text) if "\\" in self.text else None

    @cached_property
    def from_python(self) -> list[tuple[Any, str]]:
        return list(_from_python(self.text))


def dump(value: Any) -> str:
    """JSON without ASCII escapes, except for text with a lone surrogate, which UTF-8 cannot encode."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return written if written.isascii() or _has_utf8(written) else json.dumps(value, allow_nan=False)


def _readings(value: _Value, types: frozenset[str] | None) -> Iterator[tuple[Any, str]]:
    """Values that the text may stand for, each with its JSON."""
    numbers = types is not None and "string" not in types and bool(types & {"integer", "number"})
    if found := value.from_json:
        if numbers:
            yield from _quoted_number(found[0], types)
        yield found
    if types is None:
        return
    if found := value.from_escaped_json:
        if numbers:
            yield from _quoted_number(found[0], types)
        if "string" not in types or not isinstance(found[0], str):
            yield found
    if "string" not in types:
        for read, written in value.from_python:
            if numbers:
                yield from _quoted_number(read, types)
            yield read, written


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
            warnings.simplefilter("ignore")  # Python warns about invalid escapes such as "\d"
            written = dump(ast.literal_eval(text.strip()))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return
    yield json.loads(written), written


def _quoted_number(value: Any, types: frozenset[str] | None) -> Iterator[tuple[Any, str]]:
    """A number that was written as a string; only an integer if the schema does not allow "number"."""
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
