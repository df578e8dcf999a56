"""Units as exact factors of SI units: "km/h" is 5/18 of m/s."""

import re
from dataclasses import dataclass, field
from fractions import Fraction

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


_LENGTH, _MASS, _TIME, _CURRENT = {"m": 1}, {"kg": 1}, {"s": 1}, {"A": 1}
_FORCE = {"kg": 1, "m": 1, "s": -2}
_ENERGY = {"kg": 1, "m": 2, "s": -2}
_POWER = {"kg": 1, "m": 2, "s": -3}
_VOLTAGE = _POWER | {"A": -1}
_PREFIXES = {"k": 3, "M": 6, "d": -1, "c": -2, "m": -3, "u": -6, "µ": -6, "μ": -6, "n": -9}
_PREFIXED: dict[str, tuple[Fraction, Dimension]] = {
    "m": (Fraction(1), _LENGTH),
    "g": (Fraction(1, 1000), _MASS),
    "s": (Fraction(1), _TIME),
    "A": (Fraction(1), _CURRENT),
    "N": (Fraction(1), _FORCE),
    "J": (Fraction(1), _ENERGY),
    "W": (Fraction(1), _POWER),
    "Wh": (Fraction(3600), _ENERGY),
    "V": (Fraction(1), _VOLTAGE),
    "Ω": (Fraction(1), _VOLTAGE | {"A": -2}),
    "ohm": (Fraction(1), _VOLTAGE | {"A": -2}),
    "C": (Fraction(1), {"A": 1, "s": 1}),
    "Pa": (Fraction(1), {"kg": 1, "m": -1, "s": -2}),
    "L": (Fraction(1, 1000), {"m": 3}),
    "mol": (Fraction(1), {"mol": 1}),
    "Hz": (Fraction(1), {"s": -1}),
}
_PLAIN: dict[str, tuple[Fraction, Dimension]] = {
    "min": (Fraction(60), _TIME),
    "h": (Fraction(3600), _TIME),
    "day": (Fraction(86400), _TIME),
    "t": (Fraction(1000), _MASS),
    "bar": (Fraction(10**5), {"kg": 1, "m": -1, "s": -2}),
    "K": (Fraction(1), {"K": 1}),
    "°C": (Fraction(1), {"°C": 1}),  # a temperature, not a difference: it is not turned into kelvins
    "%": (Fraction(1, 100), {}),
}
_WORDS = {
    "meter": "m", "metre": "m", "kilometer": "km", "gram": "g", "kilogram": "kg", "second": "s", "minute": "min",
    "hour": "h", "ampere": "A", "amp": "A", "newton": "N", "joule": "J", "watt": "W", "volt": "V", "mole": "mol",
    "liter": "L", "litre": "L", "l": "L", "ml": "mL", "ohm": "ohm", "day": "day", "kelvin": "K",
    "percent": "%", "sec": "s", "hr": "h",
}  # fmt: skip
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


def _single(name: str) -> Unit | None:
    word = name.lower().removesuffix("s") if len(name) > 3 else name
    name = _WORDS.get(word, name)
    if name in _PLAIN:
        return Unit(*_PLAIN[name])
    if name in _PREFIXED:
        return Unit(*_PREFIXED[name])
    prefix, base = name[:1], name[1:]
    if prefix in _PREFIXES and base in _PREFIXED:
        factor, dimension = _PREFIXED[base]
        return Unit(factor * Fraction(10) ** _PREFIXES[prefix], dimension)
    return None
