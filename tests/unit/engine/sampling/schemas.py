"""Random JSON schemas of the kind that people send, and xgrammar's vocabulary for the tests."""

import random
from functools import cache
from typing import Any

from glm5.engine.sampling.compiling import Compiler, Vocabulary
from tests.support.tokenizers import tiny_tokenizer

NAMES = ("name", "age", "a b", "größe", 'quo"te', "tags", "items", "x", "id", "kind")
PATTERNS = (
    r"^[a-z]{2,6}$",
    r"^\d{3}-\d{4}$",
    r"^(red|green|blue)$",
    r"^#[0-9a-f]{6}$",
    r"^[A-Z][a-z]*( [A-Z][a-z]*)?$",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration")


class SchemaMaker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.makers = (self.integer, self.number, self.string, self.choice, self.constant, self.boolean)
        self.nested = (self.array, self.pair, self.obj, self.either, self.nullable, self.one_of, self.mapping)

    def schema(self) -> dict[str, Any]:
        """A schema; one in eight refers to a definition, and that may be recursive."""
        if self.rng.random() > 0.125:
            return self.any(3)
        node: dict[str, Any] = self.closed(
            {"value": self.any(1), "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}
        )
        return {"$defs": {"n": node, "m": self.any(1)}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}

    def any(self, depth: int) -> dict[str, Any]:
        makers = self.makers if depth == 0 else self.nested if self.rng.random() < 0.7 else self.makers
        made = self.rng.choice(makers)(depth)
        return made | {"description": "some text"} if self.rng.random() < 0.2 else made

    def integer(self, depth: int) -> dict[str, Any]:
        low = self.rng.randrange(-200, 200)
        high = low + self.rng.randrange(10, 300)
        bounds = {"minimum": low, "maximum": high, "exclusiveMinimum": low, "exclusiveMaximum": high}
        chosen = {key: value for key, value in bounds.items() if self.rng.random() < 0.4}
        low_key, high_key = {"minimum", "exclusiveMinimum"} & set(chosen), {"maximum", "exclusiveMaximum"} & set(chosen)
        if bool(low_key) == bool(high_key) and self.rng.random() < 0.3:
            chosen["multipleOf"] = self.rng.choice((2, 3, 5))
        return {"type": "integer", **chosen}

    def number(self, depth: int) -> dict[str, Any]:
        low = round(self.rng.uniform(-50, 50), self.rng.randrange(4))
        bounds = {"minimum": low, "exclusiveMaximum": low + self.rng.choice((0.5, 1, 20.25))}
        return {"type": "number", **{key: value for key, value in bounds.items() if self.rng.random() < 0.5}}

    def string(self, depth: int) -> dict[str, Any]:
        kind = self.rng.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self.rng.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self.rng.choice(FORMATS)}
        low = self.rng.randrange(4)
        return (
            {"type": "string", "minLength": low, "maxLength": low + self.rng.randrange(8)}
            if kind == 2
            else {"type": "string"}
        )

    def choice(self, depth: int) -> dict[str, Any]:
        return {"enum": self.rng.sample(["a", "b c", "é", 1, 2.5, None, True, [1, {"k": "v"}], "\n"], 3)}

    def constant(self, depth: int) -> dict[str, Any]:
        return {"const": self.rng.choice(["x", 7, None, {"a": [1, "q\\"]}, False])}

    def boolean(self, depth: int) -> dict[str, Any]:
        return {"type": self.rng.choice(["boolean", "null", ["boolean", "null"], ["integer", "string"]])}

    def array(self, depth: int) -> dict[str, Any]:
        low = self.rng.randrange(3)
        return {"type": "array", "items": self.any(depth - 1), "minItems": low, "maxItems": low + self.rng.randrange(3)}

    def pair(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {
            "type": "array",
            "prefixItems": [self.any(depth - 1), self.any(depth - 1)],
            "minItems": 2,
        }
        return made | ({"items": False} if self.rng.random() < 0.5 else {"items": self.any(0), "maxItems": 4})

    def obj(self, depth: int) -> dict[str, Any]:
        properties = {name: self.any(depth - 1) for name in self.rng.sample(NAMES, self.rng.randrange(1, 5))}
        made = self.closed(properties)
        made["required"] = [name for name in properties if self.rng.random() < 0.6]
        if self.rng.random() < 0.2:
            made["additionalProperties"] = self.any(0)
        elif self.rng.random() < 0.3:
            made["minProperties"] = self.rng.randrange(len(properties) + 1)
        return made

    def mapping(self, depth: int) -> dict[str, Any]:
        if self.rng.random() < 0.5:
            return {
                "type": "object",
                "patternProperties": {"^k[0-9]$": self.any(depth - 1)},
                "additionalProperties": False,
            }
        return {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "additionalProperties": self.any(depth - 1)}

    def closed(self, properties: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    def either(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth - 1) for _ in range(self.rng.randrange(2, 4))]}

    def nullable(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth - 1), {"type": "null"}], "default": None}

    def one_of(self, depth: int) -> dict[str, Any]:
        """Told apart by type, or by a constant that all have."""
        if self.rng.random() < 0.5:
            return {"oneOf": [self.integer(0), {"type": "string"}, {"type": "array", "items": self.any(depth - 1)}]}
        kinds = [self.closed({"kind": {"const": kind}, "value": self.any(depth - 1)}) for kind in ("p", "q")]
        return {"oneOf": kinds}


@cache
def vocabulary() -> Vocabulary:
    """Of the tiny tokenizer, for a model with a few more rows than it has tokens."""
    tokenizer = tiny_tokenizer()
    bytes_of, is_markup = tokenizer.bytes_unless_special, tokenizer.is_markup
    return Vocabulary(tokenizer.vocab_size + 5, tokenizer.eos_ids, bytes_of, is_markup)


@cache
def compiler() -> Compiler:
    return Compiler(vocabulary())
