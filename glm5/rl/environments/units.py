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
_RESISTANCE = _POWER | {"A": -2}
_PREFIXES = {"k": 3, "M": 6, "d": -1, "c": -2, "m": -3, "u": -6, "µ": -6, "μ": -6, "n": -9}
# Factor and dimension of units that take prefixes, and of those that take none. A °C is a temperature, not a
# difference: it is not turned into kelvins.
_PREFIXED: dict[str, tuple[Fraction | int, Dimension]] = {
    "m": (1, _LENGTH), "g": (Fraction(1, 1000), _MASS), "s": (1, _TIME), "A": (1, _CURRENT), "N": (1, _FORCE),
    "J": (1, _ENERGY), "W": (1, _POWER), "Wh": (3600, _ENERGY), "V": (1, _VOLTAGE), "Ω": (1, _RESISTANCE),
    "ohm": (1, _RESISTANCE), "C": (1, {"A": 1, "s": 1}), "Pa": (1, {"kg": 1, "m": -1, "s": -2}),
    "L": (Fraction(1, 1000), {"m": 3}), "mol": (1, {"mol": 1}), "Hz": (1, {"s": -1}),
}  # fmt: skip
_PLAIN: dict[str, tuple[Fraction | int, Dimension]] = {
    "min": (60, _TIME), "h": (3600, _TIME), "day": (86400, _TIME), "t": (1000, _MASS),
    "bar": (10**5, {"kg": 1, "m": -1, "s": -2}), "K": (1, {"K": 1}), "°C": (1, {"°C": 1}), "%": (Fraction(1, 100), {}),
}  # fmt: skip
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
    factor, dimension = (_PLAIN | _PREFIXED).get(name, (0, {}))
    if not factor and name[:1] in _PREFIXES and name[1:] in _PREFIXED:
        factor, dimension = _PREFIXED[name[1:]]
        factor *= Fraction(10) ** _PREFIXES[name[:1]]
    return Unit(Fraction(factor), dimension) if factor else None
