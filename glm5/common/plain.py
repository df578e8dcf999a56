"""Converts numbers and lists of NumPy, torch or subclasses to plain Python types, for messages between processes."""

from typing import Any

_PLAIN = frozenset((bool, int, float, str, type(None)))


def plain(value: Any) -> Any:
    """A number or text as a plain Python type; other values unchanged."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return value.tolist() if _dimensions(value) == 0 else value


def plain_list(value: Any) -> Any:
    """An array, list or tuple as a list of plain values; other values unchanged."""
    if _dimensions(value):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return value
    return list(value) if set(map(type, value)) <= _PLAIN else list(map(plain, value))


def _dimensions(value: Any) -> int | None:
    """The number of dimensions of an array or tensor; None for other values."""
    found = getattr(value, "ndim", None)
    return found if isinstance(found, int) and hasattr(value, "tolist") and not isinstance(value, memoryview) else None
