"""Determines the types that a JSON schema allows, as far as parsing tool arguments needs them.

It reads `type` (a name or a list), `enum`, `const`, `anyOf`, `oneOf`, `allOf` and local `$ref`; other
keywords are ignored. Each node is analysed once, so cycles and shared parts are cheap. A budget limits the
work, because a few references can multiply to any number of alternatives.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from glm5.common.budget import Budget

Node = Any
JSON_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
MAX_ALTERNATIVES = 64
"""Alternatives of a schema that are considered; further ones are ignored."""
MAX_DEPTH = 64
"""Nesting that is followed; deeper levels are ignored."""
MAX_STEPS = 1 << 16
"""Budget of schema parts and listed values, for all tools of a request together."""


def reading_budget() -> Budget:
    """The budget for the tools of one request."""
    return Budget(MAX_STEPS, "steps to read", "tools")


@dataclass(frozen=True)
class _Constraints:
    """The constraints of a node: types, values, schemas that must all match (the target of `$ref`, `allOf`), and lists
    of which one schema must match."""

    types: frozenset[str] | None
    values: list[Any] | None
    conjuncts: list[Node]
    unions: list[list[Node]]


class Schema:
    """A root schema with the cached analysis of its nodes. `owner` names it in errors. Raises RequestError if the
    analysis exceeds the budget."""

    def __init__(self, root: Node, owner: str = "the parameters", budget: Budget | None = None) -> None:
        self.root, self._owner, self._budget = root, owner, budget or reading_budget()
        self._read_nodes: dict[int, _Constraints] = {}
        self._types: dict[int, frozenset[str] | None] = {}
        self._alternatives: dict[int, list[dict[str, list[Node]]]] = {}

    def types(self, node: Node, depth: int = 0) -> frozenset[str] | None:
        """JSON types that the node allows, None if it does not restrict them. "number" includes "integer"."""
        if not isinstance(node, Mapping) or depth > MAX_DEPTH:
            return None
        if id(node) not in self._types:
            self._types[id(node)] = None  # a cycle back to here adds no constraint
            self._types[id(node)] = self._work_out_types(node, depth + 1)
        return self._types[id(node)]

    def _work_out_types(self, node: Mapping[str, Any], depth: int) -> frozenset[str] | None:
        own = self._read(node)
        found = [own.types]
        if own.values is not None:
            found.append(frozenset(json_type(value) for value in own.values))
        found += [self.types(part, depth) for part in own.conjuncts]
        for branches in own.unions:
            of_branches = [self.types(branch, depth) for branch in branches]
            known = [types for types in of_branches if types is not None]
            found.append(frozenset().union(*known) if len(known) == len(of_branches) else None)
        constraints = [types for types in found if types is not None]
        return frozenset.intersection(*constraints) if constraints else None

    def admits(self, node: Node, value: Any, known: dict[int, bool], depth: int = 0) -> bool:
        """Whether a value fits the node, by its type and by listed values. `known`: the results so far for this
        value."""
        if not isinstance(node, Mapping) or depth > MAX_DEPTH:
            return True
        if id(node) not in known:
            known[id(node)] = True  # a cycle back to here counts as fitting
            own = self._read(node)
            known[id(node)] = (
                (own.types is None or json_type(value) in own.types)
                and (own.values is None or any(json_equal(value, other) for other in own.values))
                and all(self.admits(part, value, known, depth + 1) for part in own.conjuncts)
                and all(
                    any(self.admits(branch, value, known, depth + 1) for branch in branches) for branches in own.unions
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
            groups = [[own], *(self.alternatives(part, depth + 1) for part in self._read(node).conjuncts)]
            for branches in self._read(node).unions:
                ways = (way for branch in branches for way in self.alternatives(branch, depth + 1))
                groups.append(list(islice(ways, MAX_ALTERNATIVES)))
            combined = islice(product(*groups), MAX_ALTERNATIVES)
            self._alternatives[id(node)] = [self._merged(ways) for ways in combined]
        return self._alternatives[id(node)]

    def _merged(self, ways: tuple[dict[str, list[Node]], ...]) -> dict[str, list[Node]]:
        """The conjunction of alternatives. A schema that several have for a property is listed once."""
        merged: dict[str, dict[int, Node]] = {}
        for way in ways:
            self._budget.spend(1 + sum(map(len, way.values())), self._owner)
            for key, schemas in way.items():
                merged.setdefault(key, {}).update((id(schema), schema) for schema in schemas)
        return {key: list(schemas.values()) for key, schemas in merged.items()}

    def _read(self, node: Mapping[str, Any]) -> _Constraints:
        if id(node) not in self._read_nodes:
            names, values, parts = node.get("type"), _allowed_values(node), node.get("allOf")
            conjuncts = [*self._referenced(node.get("$ref")), *(parts if isinstance(parts, list) else [])]
            unions = [node[key] for key in ("anyOf", "oneOf") if isinstance(node.get(key), list) and node[key]]
            lists = [conjuncts, *unions, values or [], names if isinstance(names, list) else []]
            self._budget.spend(1 + sum(map(len, lists)), self._owner)
            unions = [self._distinct(union) for union in unions]
            self._read_nodes[id(node)] = _Constraints(_named_types(names), values, self._distinct(conjuncts), unions)
        return self._read_nodes[id(node)]

    def _distinct(self, nodes: list[Node]) -> list[Node]:
        """The schemas without duplicates; a schema that is only a reference is replaced by its target."""
        found: dict[int, Node] = {}
        for node in nodes:
            is_reference = isinstance(node, Mapping) and len(node) == 1 and "$ref" in node
            for one in (self._referenced(node["$ref"]) if is_reference else []) or [node]:
                found[id(one)] = one
        return list(found.values())

    def _referenced(self, reference: Any) -> list[Node]:
        """The target of a local reference; empty for other and for dangling references."""
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
