"""Limits the work for one request: a schema of a few bytes can require any amount of it."""

from collections.abc import Iterator, Mapping
from typing import Any

from glm5.common.errors import RequestError


class Budget:
    """A limit on steps. `unit`: what is counted; `param`: the request field that causes them."""

    def __init__(self, most: int, unit: str, param: str) -> None:
        self.most, self.unit, self.param, self.spent = most, unit, param, 0

    def spend(self, steps: int, owner: str) -> None:
        """Count steps. Raises RequestError naming `owner` beyond the limit."""
        self.spent += steps
        if self.spent > self.most:
            raise RequestError(
                f"{owner} need too many {self.unit}: allowed for all {self.param} together: {self.most}; "
                "allOf, anyOf, oneOf and $ref multiply, and large enums add: simplify them",
                self.param,
            )


def least_chars(value: Any, most: int) -> int:
    """A lower bound of a value's length as JSON; counting stops beyond `most`."""
    count, waiting = 0, [iter((value,))]
    while waiting and count <= most:
        for one in waiting[-1]:
            count += 1
            if isinstance(one, str):
                count += 1 + len(one)
            elif isinstance(one, (Mapping, list, tuple)):
                waiting.append(_keys_and_values(one) if isinstance(one, Mapping) else iter(one))
                break
            if count > most:
                break
        else:
            waiting.pop()
    return count


def _keys_and_values(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    return (part for item in mapping.items() for part in item)
