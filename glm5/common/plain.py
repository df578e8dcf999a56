"""Numbers and lists of NumPy's, torch's or anybody's classes as Python's: messages hold no others."""

from typing import Any

_PLAIN = frozenset((bool, int, float, str, type(None)))


def plain(value: Any) -> Any:
    """A number or text of a class of its own as Python's; anything else as it is."""
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
    """The list that an array, a list or a tuple holds, of plain values; anything else as it is."""
    if _dimensions(value):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return value
    return list(value) if set(map(type, value)) <= _PLAIN else list(map(plain, value))


def _dimensions(value: Any) -> int | None:
    """Of an array or tensor; None for anything else."""
    found = getattr(value, "ndim", None)
    return found if isinstance(found, int) and hasattr(value, "tolist") and not isinstance(value, memoryview) else None
