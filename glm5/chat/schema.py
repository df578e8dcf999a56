"""What a JSON schema says about the type of a value: enough of it to read tool arguments.

Read are `type` (a name or a list), `enum`, `const`, `anyOf`, `oneOf`, `allOf` and local `$ref`; all
other keywords say nothing here. Every node is looked at once, so cycles and shared parts cost nothing.
"""

from collections.abc import Mapping
from itertools import islice, product
from typing import Any

Node = Any
JSON_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
MAX_ALTERNATIVES = 64
"""Ways to satisfy a schema that are told apart; a schema with more of them is read as its first ones."""
MAX_DEPTH = 64
"""Nesting that is followed; what lies deeper says nothing."""


class Schema:
    """A root schema and what has been worked out about its nodes."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self._types: dict[int, frozenset[str] | None] = {}
        self._alternatives: dict[int, list[dict[str, list[Node]]]] = {}

    def types(self, node: Node, depth: int = 0) -> frozenset[str] | None:
        """JSON types that the node allows, None where it does not say. "number" includes "integer"."""
        if not isinstance(node, Mapping) or depth > MAX_DEPTH:
            return None
        if id(node) not in self._types:
            self._types[id(node)] = None  # what a cycle back to here learns: nothing
            self._types[id(node)] = self._work_out_types(node, depth + 1)
        return self._types[id(node)]

    def _work_out_types(self, node: Mapping[str, Any], depth: int) -> frozenset[str] | None:
        said = [_named_types(node.get("type"))]
        if (allowed := _allowed_values(node)) is not None:
            said.append(frozenset(json_type(value) for value in allowed))
        said += [self.types(part, depth) for part in self._conjuncts(node)]
        for branches in _disjunctions(node):
            of_branches = [self.types(branch, depth) for branch in branches]
            known = [types for types in of_branches if types is not None]
            said.append(frozenset().union(*known) if len(known) == len(of_branches) else None)
        constraints = [types for types in said if types is not None]
        return frozenset.intersection(*constraints) if constraints else None

    def admits(self, node: Node, value: Any) -> bool:
        """Whether a value of this type, and this value where they are listed, fits the node."""
        return self._admits(node, value, {}, 0)

    def _admits(self, node: Node, value: Any, known: dict[int, bool], depth: int) -> bool:
        if not isinstance(node, Mapping) or depth > MAX_DEPTH:
            return True
        if id(node) not in known:
            known[id(node)] = True  # what a cycle back to here learns: no objection
            types, allowed = _named_types(node.get("type")), _allowed_values(node)
            known[id(node)] = (
                (types is None or json_type(value) in types)
                and (allowed is None or any(json_equal(value, other) for other in allowed))
                and all(self._admits(part, value, known, depth + 1) for part in self._conjuncts(node))
                and all(
                    any(self._admits(branch, value, known, depth + 1) for branch in branches)
                    for branches in _disjunctions(node)
                )
            )
        return known[id(node)]

    def alternatives(self, node: Node, depth: int = 0) -> list[dict[str, list[Node]]]:
        """Ways to satisfy an object schema: for each, property -> the schemas that its value must all fit."""
        if not isinstance(node, Mapping) or depth > MAX_DEPTH:
            return [{}]
        if id(node) not in self._alternatives:
            self._alternatives[id(node)] = [{}]
            properties = node.get("properties")
            own = {key: [schema] for key, schema in properties.items()} if isinstance(properties, Mapping) else {}
            groups = [[own], *(self.alternatives(part, depth + 1) for part in self._conjuncts(node))]
            groups += [
                [way for branch in branches for way in self.alternatives(branch, depth + 1)]
                for branches in _disjunctions(node)
            ]
            self._alternatives[id(node)] = [_merged(ways) for ways in islice(product(*groups), MAX_ALTERNATIVES)]
        return self._alternatives[id(node)]

    def _conjuncts(self, node: Mapping[str, Any]) -> list[Node]:
        """Schemas that hold besides the node's own keywords: the target of its `$ref`, its `allOf`."""
        parts = node.get("allOf")
        return [*self._referenced(node.get("$ref")), *(parts if isinstance(parts, list) else [])]

    def _referenced(self, reference: Any) -> list[Node]:
        """The node that a local reference points at; none for others and for those that lead nowhere."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return []
        node = self.root
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return []
        return [node]


def json_type(value: Any) -> str:
    """Type name of a JSON value. A number without a fraction is an integer, however it is written."""
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def json_equal(left: Any, right: Any) -> bool:
    """Equality of JSON values: true is not 1, but 1.0 is."""
    if json_type(left) != json_type(right):
        return False
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(json_equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(json_equal, left, right))
    return left == right


def _named_types(names: Any) -> frozenset[str] | None:
    listed = frozenset(name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str))
    if not listed or not listed <= JSON_TYPES:
        return None
    return listed | {"integer"} if "number" in listed else listed


def _allowed_values(node: Mapping[str, Any]) -> list[Any] | None:
    values = [node["const"]] if "const" in node else node.get("enum")
    return values if isinstance(values, list) else None


def _disjunctions(node: Mapping[str, Any]) -> list[list[Node]]:
    return [node[key] for key in ("anyOf", "oneOf") if isinstance(node.get(key), list) and node[key]]


def _merged(ways: tuple[dict[str, list[Node]], ...]) -> dict[str, list[Node]]:
    merged: dict[str, list[Node]] = {}
    for way in ways:
        for key, schemas in way.items():
            merged[key] = merged.get(key, []) + schemas
    return merged
