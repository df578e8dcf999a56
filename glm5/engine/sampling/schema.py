"""JSON schemas that xgrammar would not enforce, refused by keyword and place.

xgrammar (0.2.8 checked) drops what it does not understand, some of it with a line on stderr and some in silence: its
grammar then lets invalid answers through. Each rule here stands for a case that was seen to. What passes is enforced,
except that a key may come twice, that `format` is a pattern (April 31 is a date), and that bytes of half a surrogate
pair count as one character of a bounded string, though they decode as three. Only what the root reaches is looked at.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from glm5.common.errors import RequestError

MAX_DEPTH = 64  # compiling a schema of depth 1000 takes minutes

_UNENFORCED = (
    "not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_FOR_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_FOR_STRINGS = ("minLength", "maxLength", "pattern", "format")
_FOR_ARRAYS = ("minItems", "maxItems", "uniqueItems", "items", "prefixItems", "unevaluatedItems")
_FOR_OBJECTS = (
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties",
)  # fmt: skip
_ASSERTIONS = (*_FOR_NUMBERS, *_FOR_STRINGS, *_FOR_ARRAYS, *_FOR_OBJECTS)
_CHOOSERS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # each decides alone: its neighbours are dropped
# Type a schema is taken for when it names none but has one of these.
_IMPLIES = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
_BROKEN_FORMATS = ("json-pointer", "relative-json-pointer")  # their patterns let bare quotes through
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "boolean": bool,
    "null": type(None),
}  # fmt: skip
# In a JSON string a pattern is matched against the text as written: these would have to be escaped there.
_UNWRITABLE = re.compile(r'"|\\(?:\\|[nrtfvb0c]|x[01]|x22|x5[cC]|u00[01]|u0022|u005[cC]|u\{)')
_MAX_REPEATS = 128  # beyond, the compiler fails on an assertion of its own
_MAX_PATTERN = 4096  # characters; longer ones take long to look through
_MAX_REGEX = 1 << 14  # characters of a regex that is all of the answer
_MAX_OPERATORS = 128  # *, +, ? and {} of a regex: compiling takes the square of them
_MAX_COUNTED = 64  # optional properties of which some number must be there: compiling takes the cube of them
_MAX_ALTERNATIVES = 256  # of a oneOf: each is compared to each
# What a pattern is searched with, and in, to find whether it matches a name.
_MAX_SEARCHED, _MAX_NAME = 3, 256
_REPEATED_GROUP, _REPEAT = re.compile(r"\)[*+?{]"), re.compile(r"[*+?{]")
_COUNT = re.compile(r"(?<=[{,])\d+(?=[,}])")
_STRAY_ANCHOR = re.compile(r"(?<=[^|])\^|\$(?=[^|])")
_NOT_ANCHORS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)  # escapes and classes


def refuse_unenforced(schema: Any) -> None:
    """Raises RequestError naming the first keyword of `schema` (parsed) that a grammar would not honour."""
    seen: dict[int, Any] = {}
    waiting: list[tuple[_Place, Any, int]] = [(_Place("#"), schema, 0)]
    while waiting:
        place, here, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise _refusal(place, f"is nested more than {MAX_DEPTH} deep; flatten it or use $ref")
        if id(here) in seen or isinstance(here, bool):
            continue
        seen[id(here)] = here
        if not isinstance(here, Mapping):
            raise _refusal(place, f"is {json.dumps(here)[:80]}; allowed: an object, true or false")
        try:
            for keyword, why in _complaints(here, schema):
                raise _refusal(f"{place}/{keyword}", why)
            waiting += [(_Place(step, place), child, depth + 1) for step, child in _children(here)]
        except (TypeError, AttributeError, KeyError) as error:
            raise _refusal(place, f"has a keyword whose value is of a wrong type ({error})") from error
        if "$ref" in here:
            target_place, target = _target(here, schema)
            waiting.append((_Place(target_place), target, depth))


@dataclass(frozen=True)
class _Place:
    """Where a schema is; written out only for a complaint, as names may be long and there may be many places."""

    step: str
    outer: "_Place | None" = None

    def __str__(self) -> str:
        return self.step if self.outer is None else f"{self.outer}/{self.step}"


def too_slow(regex: str) -> str | None:
    """Why compiling a regex would take very long, if it would."""
    if len(regex) > _MAX_REGEX:
        return f"has {len(regex)} characters; allowed in a regex: {_MAX_REGEX}"
    count = len(_REPEAT.findall(_NOT_ANCHORS.sub("", regex).replace("(?", "(")))
    return None if count <= _MAX_OPERATORS else f"repeats {count} parts; allowed: {_MAX_OPERATORS}"


def _complaints(here: Mapping[str, Any], root: Any) -> Iterator[tuple[str, str]]:
    """(keyword, what is wrong with it) for one schema, its subschemas apart."""
    for keyword in _UNENFORCED:
        if keyword in here:
            yield keyword, "cannot be enforced; remove it, or check it on the answer"
    if "$id" in here and here is not root:
        yield "$id", "changes what $ref means; only the outermost schema may have one"
    choosers = _chooses(here)
    if choosers:
        yield from _choice_complaints(here, choosers, root)
        return
    kinds = _kinds(here)
    for owners, keywords in _OWNERS.items():
        unenforced = [keyword for keyword in keywords if keyword in here and "type" not in here and not owners & kinds]
        if unenforced:
            yield unenforced[0], f'is only enforced where "type" says {" or ".join(sorted(owners))}; add the type'
    yield from _number_complaints(here, kinds)
    yield from _string_complaints(here)
    if here.get("uniqueItems") and here.get("maxItems", 2) > 1:
        yield "uniqueItems", "cannot be enforced; remove it, or set maxItems to 1"
    for keyword in ("minItems", "maxItems"):  # more items than are described are never written
        if "array" in kinds and "items" not in here and here.get(keyword, 0) > len(here.get("prefixItems", ())):
            yield keyword, 'is only enforced beside "items"; add "items": {} for items of any kind'
    if "object" in kinds:
        yield from _object_complaints(here)


def _choice_complaints(here: Mapping[str, Any], choosers: list[str], root: Any) -> Iterator[tuple[str, str]]:
    chooser = choosers[0]
    unenforced = [*choosers[1:], *(keyword for keyword in _ASSERTIONS if keyword in here)]
    if chooser not in ("const", "enum") and "type" in here:
        unenforced.append("type")
    if unenforced:
        yield unenforced[0], f"is not enforced beside {chooser}; move it into the schema there"
    if chooser == "allOf" and len(here["allOf"]) != 1:
        yield "allOf", f"has {len(here['allOf'])} schemas; allowed: 1, merge them"
    if chooser == "oneOf" and len(here["oneOf"]) > _MAX_ALTERNATIVES:
        yield "oneOf", f"has {len(here['oneOf'])} alternatives; allowed: {_MAX_ALTERNATIVES}, or write anyOf"
    elif chooser == "oneOf" and not _disjoint([_resolved(one, root) for one in here["oneOf"]]):
        yield (
            "oneOf",
            "has alternatives that may both hold; write anyOf, or tell them apart by type or const",
        )
    if chooser in ("const", "enum") and "type" in here:
        values = here["enum"] if chooser == "enum" else [here["const"]]
        wrong = [value for value in values if not any(_is_a(value, kind) for kind in _kinds(here))]
        if wrong:
            yield chooser, f"holds {json.dumps(wrong[0])[:80]}, which is not of type {json.dumps(here['type'])}"


def _number_complaints(here: Mapping[str, Any], kinds: set[str]) -> Iterator[tuple[str, str]]:
    step = here.get("multipleOf")
    if step is not None:
        bounded = ["minimum" in here or "exclusiveMinimum" in here, "maximum" in here or "exclusiveMaximum" in here]
        if "number" in kinds or not isinstance(step, int):
            yield "multipleOf", "is only enforced for integers"
        elif len(set(bounded)) > 1:
            yield "multipleOf", "is only enforced with both bounds or none"
    for bound in _FOR_NUMBERS[:4]:
        value = here.get(bound)
        if isinstance(value, float) and 0 < abs(value) < 1e-6:
            yield bound, f"is {value}: bounds closer to 0 than 1e-6 are not enforced"


def _string_complaints(here: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    pattern, described = here.get("pattern"), [key for key in ("pattern", "format") if key in here]
    if here.get("format") in _BROKEN_FORMATS:
        yield "format", f"{here['format']!r:.60} lets invalid JSON through; use a pattern"
    if len(described) > 1 or (described and ("minLength" in here or "maxLength" in here)):
        dropped = next(key for key in _FOR_STRINGS if key in here and key != described[-1])
        yield dropped, f"is not enforced beside {described[-1]}; say it in one pattern"
    if isinstance(pattern, str) and len(pattern) > _MAX_PATTERN:
        yield "pattern", f"has {len(pattern)} characters; allowed: {_MAX_PATTERN}"
    elif isinstance(pattern, str) and (why := too_slow(pattern)):
        yield "pattern", why
    elif isinstance(pattern, str) and (found := _UNWRITABLE.search(pattern)):
        not_escaped = "quotes, backslashes and control characters are not escaped"
        yield "pattern", f"{pattern!r:.60} holds {found[0]!r}: {not_escaped}"
    elif isinstance(pattern, str) and any(int(count) > _MAX_REPEATS for count in _COUNT.findall(pattern)):
        yield "pattern", f"{pattern!r:.60} repeats something more than {_MAX_REPEATS} times; use *, + or maxLength"
    elif isinstance(pattern, str) and _STRAY_ANCHOR.search(_NOT_ANCHORS.sub("x", pattern)):
        yield "pattern", f"{pattern!r:.60} has an anchor inside; allowed: ^ first and $ last"


def _object_complaints(here: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    names, patterns = here.get("properties", {}), here.get("patternProperties", {})
    missing = [name for name in here.get("required", ()) if name not in names]
    if missing:
        yield "required", f"names {missing[0]!r:.60}, which properties does not describe; describe it there"
    num_optional = len(names) - len(here.get("required", ()))
    counts = here.get("minProperties", 0) > len(here.get("required", ())) or here.get(
        "maxProperties", len(names)
    ) < len(names)
    if counts and num_optional > _MAX_COUNTED:
        keyword = "minProperties" if "minProperties" in here else "maxProperties"
        yield keyword, f"counts among {num_optional} optional properties; allowed: {_MAX_COUNTED}, or require some"
    open_ended = bool(patterns) or "propertyNames" in here or here.get("additionalProperties", False) is not False
    if open_ended and here.get("minProperties", 0) > max(1, len(here.get("required", ()))):
        yield "minProperties", "is not enforced for keys that the schema does not name: one key may come twice"
    if patterns:
        if len(patterns) > 1 or here.get("additionalProperties", False) is not False or "propertyNames" in here:
            yield (
                "patternProperties",
                "is only enforced with one pattern and additionalProperties false",
            )
        elif any(_may_match(pattern, name) for pattern in patterns for name in names):
            yield "patternProperties", "has a pattern that a name in properties matches"
    if "propertyNames" in here and names:
        yield "propertyNames", "is not enforced beside properties"


def _children(here: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(step, schema) of the schemas that this one applies. Definitions are looked at where they are used."""
    names = here.get("propertyNames", True)
    # Names are strings, whether their schema says so or not.
    yield "propertyNames", {"type": "string", **names} if isinstance(names, Mapping) and not _chooses(names) else names
    for keyword in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"):
        if keyword in here and not isinstance(here[keyword], list):  # a list of items is refused by the compiler
            yield keyword, here[keyword]
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        for index, child in enumerate(here.get(keyword, ())):
            yield f"{keyword}/{index}", child
    for keyword in ("properties", "patternProperties"):
        for name, child in here.get(keyword, {}).items():
            yield f"{keyword}/{name}", child


def _target(here: Mapping[str, Any], root: Any) -> tuple[str, Any]:
    """What a $ref stands for, and where that is; a chain of nothing but $refs is followed to its end."""
    seen: set[str] = set()
    reference = here["$ref"]
    while True:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _refusal("$ref", f"is {reference!r:.60}; allowed: # and #/..., within this schema")
        if reference in seen:
            raise _refusal(reference, "refers to itself and nothing else")
        seen.add(reference)
        if len(seen) > MAX_DEPTH:
            raise _refusal(f"{here['$ref']:.60}", f"refers through more than {MAX_DEPTH} references; refer to the last")
        target = root
        for name in reference.split("/")[1:]:
            if not isinstance(target, Mapping) or name not in target:
                raise _refusal(reference, "is referred to, but not there")
            target = target[name]
        if not isinstance(target, Mapping) or "$ref" not in target:
            return reference, target
        reference = target["$ref"]


def _resolved(schema: Any, root: Any) -> Any:
    return _target(schema, root)[1] if isinstance(schema, Mapping) and "$ref" in schema else schema


def _kinds(here: Mapping[str, Any]) -> set[str]:
    """Types that a schema names, or is taken for."""
    kinds = here.get("type", [kind for keyword, kind in _IMPLIES.items() if keyword in here])
    return set(kinds) if isinstance(kinds, list) else {kinds}


def _chooses(here: Mapping[str, Any]) -> list[str]:
    return [keyword for keyword in _CHOOSERS if keyword in here]


def _disjoint(alternatives: Any) -> bool:
    """Whether no value can be of two of the alternatives, as far as one can see."""
    return all(
        _are_disjoint(first, second) for index, first in enumerate(alternatives) for second in alternatives[index + 1 :]
    )


def _are_disjoint(first: Any, second: Any) -> bool:
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return False
    kinds = [_kinds(side) | ({"integer"} if "number" in _kinds(side) else set()) for side in (first, second)]
    if all(kinds) and not kinds[0] & kinds[1]:
        return True
    ours, theirs = _values(first), _values(second)
    if ours is not None and theirs is not None:
        return set(map(_key, ours)).isdisjoint(map(_key, theirs))
    if not kinds[0] == kinds[1] == {"object"}:
        return False
    shared = set(first.get("required", ())) & set(second.get("required", ()))
    return any(_are_disjoint(*(side.get("properties", {}).get(name) for side in (first, second))) for name in shared)


def _key(value: Any) -> Any:
    """The same for JSON values that are equal in Python, and only for those."""
    if isinstance(value, list):
        return ("list", *map(_key, value))
    if isinstance(value, Mapping):
        return ("object", frozenset((name, _key(one)) for name, one in value.items()))
    return value


def _values(here: Mapping[str, Any]) -> list[Any] | None:
    return here["enum"] if "enum" in here else [here["const"]] if "const" in here else None


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, ()))


def _may_match(pattern: str, name: str) -> bool:
    """Whether it matches; also where that could take long, as Python's search tries every way to repeat."""
    if _REPEATED_GROUP.search(pattern) or len(_REPEAT.findall(pattern)) > _MAX_SEARCHED or len(name) > _MAX_NAME:
        return True
    try:
        return re.search(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return True


def _refusal(place: object, why: str) -> RequestError:
    return RequestError(f"structured_outputs.json: {place} {why}", param="structured_outputs")


_OWNERS = {
    frozenset({"integer", "number"}): _FOR_NUMBERS,
    frozenset({"string"}): _FOR_STRINGS,
    frozenset({"array"}): _FOR_ARRAYS,
    frozenset({"object"}): _FOR_OBJECTS,
}
