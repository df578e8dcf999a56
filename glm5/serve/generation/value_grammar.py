"""Values of tool arguments as a grammar, from the JSON schema of a function's parameters.

    string               its text as it is: bounded by minLength and maxLength, or by pattern or format
    enum, const          one of the values: strings as they are, others as JSON
    several types        one of them; any text if string is among them
    empty schema         any text
    other schemas        JSON that fits the schema

A constraint that a grammar cannot enforce is refused by name in a strict tool, and ignored in others. A schema that
several places refer to is translated once. A grammar has no references, so its text is repeated in each place; the
budget counts it before it is written.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from glm5.common.budget import Budget, least_chars
from glm5.common.errors import RequestError
from glm5.engine.sampling.params import MAX_CHARS
from glm5.engine.sampling.schema import refuse_unenforced

Format = dict[str, Any]

ANY_TEXT: Format = {"type": "any_text"}
NOTHING: Format = {"type": "any_text", "max_chars": 0}
_MAX_WHITESPACE = 64  # between two JSON tokens
_MAX_DEPTH = 16  # of unions and references
_MAX_COUNTED = 128  # characters that a pattern counts
_DEFINITIONS = ("$defs", "definitions")
# Keywords that do not constrain a value.
_IGNORED = ("title", "description", "default", "examples", "example", "deprecated", "$comment", "readOnly", "writeOnly")
_DATE, _TIME = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?"
_ZONE, _BYTE = r"(Z|[+-]([01]\d|2[0-3]):[0-5]\d)", r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME + _ZONE,
    "date-time": f"{_DATE}T{_TIME}{_ZONE}",
    "email": r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "hostname": r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+",
}


def concat(*formats: Format) -> Format:
    if not formats:
        return NOTHING
    return formats[0] if len(formats) == 1 else {"type": "sequence", "elements": list(formats)}


def either(formats: Sequence[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def maybe(form: Format) -> Format:
    return {"type": "optional", "content": form}


def grammar_budget() -> Budget:
    """The budget for the tools of one request: the engine compiles no longer grammar."""
    return Budget(MAX_CHARS, "characters of a grammar", "tools")


@dataclass
class _Translated:
    """A translated schema. `form` None: translation is in progress. `num_chars`: the length of its grammar."""

    schema: Mapping[str, Any]
    form: Format | None = None
    num_chars: int = 0


@dataclass(frozen=True)
class _Plain:
    """A schema without annotations, and its `$ref` if it is only that. Holding `schema` keeps its id unique."""

    schema: Mapping[str, Any]
    bare: Mapping[str, Any]
    reference: str | None


class ValueGrammar:
    """The grammar of values of the schema `root`, which belongs to `owner`. `exact`: refuse what cannot be enforced.

    Raises RequestError if the grammar exceeds the budget."""

    def __init__(self, root: Mapping[str, Any], owner: str, budget: Budget, *, exact: bool) -> None:
        self.root, self.owner, self.exact, self._budget = root, owner, exact, budget
        self._plain: dict[int, _Plain] = {}
        self._values: dict[int, _Translated] = {}

    def objects(self) -> list[Mapping[str, Any]] | None:
        """Object schemas of which the arguments must fit one; None if they cannot be constrained."""
        ways = self._objects()
        if ways is None and self.exact:
            raise self._refusal("must be an object with properties, or anyOf such objects")
        return ways

    def value(self, schema: Any, depth: int = 0) -> Format:
        """The grammar of one value."""
        schema = self._resolved(schema)
        if schema is True or schema == {}:
            self._write(ANY_TEXT)
            return ANY_TEXT
        if not isinstance(schema, Mapping):
            raise self._refusal(f"have a property whose schema is {json.dumps(schema)[:60]}")
        if depth > _MAX_DEPTH:
            return self._cannot(f"nest unions and references more than {_MAX_DEPTH} deep")
        known = self._values.get(id(schema))
        if known is None:
            known = self._values[id(schema)] = _Translated(schema)
            before = self._budget.spent
            known.form = self._translated(schema, depth)
            known.num_chars = self._budget.spent - before
        elif known.form is None:
            return self._cannot("have a union that refers to itself")
        else:
            self._budget.spend(known.num_chars, self.owner)
        return known.form

    def _translated(self, schema: Mapping[str, Any], depth: int) -> Format:
        if (listed := _listed(schema)) is not None:
            return self._write(_one_of([_spelled(value) for value in listed]))
        for union in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(union)
            if isinstance(parts, list) and parts and not _keywords(schema) - {union, "type", "nullable"}:
                if union == "allOf" and len(parts) > 1:
                    break
                kind = {"type": schema["type"]} if "type" in schema else {}
                return self._union(
                    [{**kind, **part} if isinstance(part, Mapping) and "$ref" not in part else part for part in parts]
                    if kind
                    else parts,
                    depth,
                )
        if isinstance(types := schema.get("type"), list) and types:
            self._budget.spend(len(types) * len(schema), self.owner)
            return self._union([{**schema, "type": one} for one in dict.fromkeys(types)], depth)
        return self._write(self._string(schema) if schema.get("type") == "string" else self._json(schema))

    def _union(self, parts: Sequence[Any], depth: int) -> Format:
        """The union of these schemas, without duplicates."""
        distinct = {id(one): one for one in map(self._resolved, parts)}
        formats = [self.value(one, depth + 1) for one in distinct.values()]
        return ANY_TEXT if ANY_TEXT in formats else either(formats)

    def _write(self, form: Format) -> Format:
        self._budget.spend(least_chars(form, self._budget.most), self.owner)
        return form

    def _objects(self) -> list[Mapping[str, Any]] | None:
        ways: dict[int, Mapping[str, Any]] = {}
        seen: set[int] = set()
        waiting: list[Any] = [self.root]
        while waiting:
            schema = self._resolved(waiting.pop())
            if not isinstance(schema, Mapping):
                return None
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            is_object = isinstance(schema.get("properties", {}), Mapping) and schema.get("type", "object") == "object"
            branches = schema.get("anyOf", schema.get("oneOf"))
            if not _keywords(schema) - {"type", "properties", "required", "additionalProperties"}:
                is_way = is_object
            elif isinstance(branches, list) and not len(_keywords(schema) - {"type"}) > 1:
                waiting += reversed(branches)
                continue
            else:
                is_way = is_object and "properties" in schema and not self.exact
            if not is_way:
                return None
            ways[id(schema)] = schema
        return list(ways.values()) or None

    def _string(self, schema: Mapping[str, Any]) -> Format:
        pattern, form = schema.get("pattern"), schema.get("format")
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
        bounded = shortest > 0 or longest is not None
        if pattern is not None and form is None and not bounded:
            return {"type": "regex", "pattern": pattern.removeprefix("^").removesuffix("$")}
        if form in _FORMATS and pattern is None and not bounded:
            return {"type": "regex", "pattern": _FORMATS[form]}
        if pattern is not None or form is not None:
            known = ", ".join(_FORMATS)
            return self._cannot(
                f"have a string with a format other than {known}, or with two of pattern, format, length"
            )
        if shortest > _MAX_COUNTED or (longest is not None and longest < shortest):
            return self._cannot(f"have a minLength above {_MAX_COUNTED}, or above maxLength")
        rest = ANY_TEXT if longest is None else {**ANY_TEXT, "max_chars": longest - shortest}
        return concat({"type": "regex", "pattern": f"[\\s\\S]{{{shortest}}}"}, rest) if shortest else rest

    def _json(self, schema: Mapping[str, Any]) -> Format:
        bare = _bare(schema)
        full = {**bare, **self._definitions} if _refers(bare) else bare
        form = {"type": "json_schema", "json_schema": full, "max_whitespace_cnt": _MAX_WHITESPACE}
        if self._budget.spent + least_chars(form, self._budget.most) <= self._budget.most:
            try:
                refuse_unenforced(full)
            except RequestError as error:
                return self._cannot(str(error).removeprefix("structured_outputs.json: "))
        return form

    @cached_property
    def _definitions(self) -> dict[str, Any]:
        return {key: _bare(self.root[key]) for key in _DEFINITIONS if isinstance(self.root.get(key), Mapping)}

    def _resolved(self, schema: Any) -> Any:
        """The schema without annotations, local references followed: the same object for every reference to it."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping):
                return schema
            plain = self._plain.get(id(schema))
            if plain is None:
                bare = {key: value for key, value in schema.items() if key not in _IGNORED}
                reference = bare.get("$ref")
                refers = isinstance(reference, str) and len(_keywords(bare)) == 1
                plain = self._plain[id(schema)] = _Plain(schema, bare, reference if refers else None)
                self._plain.setdefault(id(bare), _Plain(bare, bare, plain.reference))
            if plain.reference is None:
                return plain.bare
            schema = self._referenced(plain.reference)
        raise self._refusal("have references that lead to references without end")

    def _referenced(self, reference: str) -> Any:
        here: Any = self.root
        for step in reference.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(here, Mapping) or name not in here:
                raise self._refusal(f"refer to {reference!r:.60}, which does not exist")
            here = here[name]
        return here

    def _cannot(self, why: str) -> Format:
        """Handle a constraint that no grammar can enforce: refuse it, or allow any text."""
        if self.exact:
            raise self._refusal(f"cannot be enforced: {why}; change them, or leave out strict")
        return ANY_TEXT

    def _refusal(self, why: str) -> RequestError:
        return RequestError(f"{self.owner} {why}", "tools")


def _one_of(texts: Sequence[str]) -> Format:
    some = [{"type": "const_string", "value": text} for text in dict.fromkeys(texts) if text]
    if not some:
        return NOTHING
    return maybe(either(some)) if "" in texts else either(some)


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and values else None


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _keywords(schema: Mapping[str, Any]) -> set[str]:
    return {key for key in schema if not key.startswith("$") or key == "$ref"} - {"definitions"}


def _refers(schema: Any) -> bool:
    """Whether a schema contains a key `$ref`."""
    waiting = [schema]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Mapping):
            if "$ref" in here:
                return True
            waiting += here.values()
        elif isinstance(here, list):
            waiting += here
    return False


_NAMES = ("properties", "patternProperties", *_DEFINITIONS)


def _bare(schema: Any) -> Any:
    """A schema without annotations, at any depth; property names are kept, even if they equal an annotation."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: {name: _bare(one) for name, one in value.items()}
        if key in _NAMES and isinstance(value, Mapping)
        else value
        if key in ("enum", "const")
        else _bare(value)
        for key, value in schema.items()
        if key not in _IGNORED
    }
