"""Errors of configurations, in one line: key, value and what is allowed."""

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from glm5.common.errors import ConfigError


class Refused(ValueError):
    """A validator's error about another field than its own; `key` may be a dotted path."""

    def __init__(self, key: str, value: Any, allowed: str) -> None:
        super().__init__(allowed)
        self.key, self.value = key, value


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        digits = x.bit_length() // 4 + 1
        return super().repr_int(x, level) if digits < 1000 else f"an integer of {digits} hexadecimal digits"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 60
_LONG = 200
"""Characters of a value that are shown."""

_ALLOWED = {
    "missing": "it must be given",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "string_unicode": "a text in valid Unicode",
    "string_too_short": "a text that is not empty",
    "dict_type": "an object",
    "model_type": "an object",
    "none_required": "None",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "at least {min_length} of them",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge:.12g}",
    "greater_than": "above {gt:.12g}",
    "less_than_equal": "at most {le:.12g}",
    "less_than": "below {lt:.12g}",
    "extra_forbidden": "no such key",
    "value_error": "{error}",
}


def refuse(key: str, value: Any, allowed: str) -> ConfigError:
    """A configuration error in the common format. Long values are shortened."""
    shown = _SHORT.repr(value)
    return ConfigError(f"{key}: got {shown if len(shown) <= _LONG else shown[:_LONG] + '...'}; allowed: {allowed}")


def first_error(err: ValidationError) -> tuple[tuple[str, ...], Any, str]:
    """(path of the field, value, what is allowed) of pydantic's first error."""
    return complaint(err.errors(include_url=False)[0])


def complaint(first: Mapping[str, Any]) -> tuple[tuple[str, ...], Any, str]:
    """The same for one error of pydantic's list."""
    if isinstance(cause := first.get("ctx", {}).get("error"), Refused):
        return tuple(cause.key.split(".")), cause.value, str(cause)
    text = _ALLOWED.get(first["type"])
    allowed = first["msg"] if text is None else text.format(**first.get("ctx", {}))
    value = _NOTHING if first["type"] == "missing" else first["input"]  # of a missing field, pydantic gives the parent
    return tuple(str(part) for part in first["loc"]), value, allowed
