"""Units (units.toml) as exact factors of SI units: "km/h" is 5/18 of m/s."""

import re
import tomllib
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

Dimension = dict[str, int]
MAX_CHARS = 40


@dataclass(frozen=True)
class Unit:
    """`factor` of the SI unit of `dimension` (powers of m, kg, s, A, K, mol that are not 0)."""

    factor: Fraction
    dimension: Dimension = field(default_factory=dict[str, int])

    def times(self, other: "Unit", power: int = 1) -> "Unit":
        powers = {
            base: self.dimension.get(base, 0) + power * other.dimension.get(base, 0)
            for base in self.dimension | other.dimension
        }
        return Unit(self.factor * other.factor**power, {base: number for base, number in powers.items() if number})


_SUPERSCRIPTS = str.maketrans({"²": "^2", "³": "^3", "·": "*", "\u00d7": "*", "Ω": "Ω"})
_POWERED = re.compile(r"(?P<name>[A-Za-zΩµμ%°]+)(?:\^?(?P<power>-?[1-4]))?")


def unit_of(text: str) -> Unit | None:
    """The unit that a text names, such as "m/s^2", "g/mol" or "kilograms"; None if it names none."""
    if len(text) > MAX_CHARS:
        return None
    whole, sign = Unit(Fraction(1)), 1
    parts = re.split(r"\s*([*/ ])\s*", text.translate(_SUPERSCRIPTS).replace(" per ", "/").strip())
    for part in parts:
        if part in ("*", "/", " "):
            sign = -1 if part == "/" else 1
            continue
        found = _POWERED.fullmatch(part)
        single = _single(found["name"]) if found else None
        if found is None or single is None:
            return None
        whole = whole.times(single, sign * int(found["power"] or 1))
    return whole


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _single(name: str) -> Unit | None:
    tables = _tables()
    word, power = name.lower().removesuffix("s") if len(name) > 3 else name, 0
    name = tables["words"].get(word, name)
    found = (tables["prefixed"] | tables["plain"]).get(name)
    if found is None and name[:1] in tables["prefixes"]:
        found, power = tables["prefixed"].get(name[1:]), tables["prefixes"][name[:1]]
    return None if found is None else Unit(Fraction(found[0]) * Fraction(10) ** power, found[1])
