"""Science in three levels: units, kinematics, circuits, stoichiometry, heat and gases. Every answer is an exact
rational number with a unit: constants that are needed are given in the question."""

from fractions import Fraction

from glm5.rl.environments.families import Level, Question, Questions
from glm5.rl.environments.units import unit_of

EASY, MEDIUM, HARD = Level(), Level(), Level()

CONVERSIONS = (
    "km m", "m cm", "cm m", "mm m", "g kg", "kg g", "t kg", "h min", "min s", "h s", "ms s", "mA A", "kV V", "mV V",
    "kJ J", "J kJ", "kW W", "mL L", "L mL", "kPa Pa", "bar kPa", "mmol mol", "km/h m/s", "m/s km/h", "m/min m/s",
)  # fmt: skip
COMPOUND_CONVERSIONS = (
    "g/cm^3 kg/m^3", "kg/m^3 g/cm^3", "N/cm^2 kPa", "kWh MJ", "MJ kWh", "L/min m^3/h", "cm^2 m^2", "m^3 L", "cm^3 mL",
    "g/L kg/m^3", "mol/L mmol/mL", "kN/m^2 bar", "km/h cm/s", "mg/mL g/L", "kJ/min W", "m/s km/h", "dm^3 cm^3",
)  # fmt: skip
COMPOUNDS = {"H2O": 18, "CO2": 44, "NaOH": 40, "CaCO3": 100, "NH3": 17, "CH4": 16, "H2SO4": 98, "O2": 32, "SO2": 64}
REACTIONS = (
    (("2 H2", 2, 2), ("O2", 1, 32), ("2 H2O", 2, 18)),
    (("N2", 1, 28), ("3 H2", 3, 2), ("2 NH3", 2, 17)),
    (("2 Mg", 2, 24), ("O2", 1, 32), ("2 MgO", 2, 40)),
    (("4 Al", 4, 27), ("3 O2", 3, 32), ("2 Al2O3", 2, 102)),
    (("C", 1, 12), ("O2", 1, 32), ("CO2", 1, 44)),
    (("2 SO2", 2, 64), ("O2", 1, 32), ("2 SO3", 2, 80)),
    (("CaO", 1, 56), ("CO2", 1, 44), ("CaCO3", 1, 100)),
    (("2 CO", 2, 28), ("O2", 1, 32), ("2 CO2", 2, 44)),
)
"""Two substances and their product: as written, number of molecules, g/mol."""


def science() -> Questions:
    """The environment."""
    return Questions("science", (EASY, MEDIUM, HARD))


def _converted(tenths: int, pair: str) -> Question:
    given, asked = pair.split(" ")
    start, end = unit_of(given), unit_of(asked)
    assert start is not None
    assert end is not None
    amount = Fraction(tenths, 10)
    return Question(f"Convert {_short(amount)} {given} to {asked}.", amount * start.factor / end.factor, asked)


def _short(value: Fraction) -> str:
    return f"{float(value):g}"


@EASY.family(tenths=range(2, 2000), pair=CONVERSIONS)
def units(tenths: int, pair: str) -> Question:
    return _converted(tenths, pair)


@EASY.family(s=range(10, 500), t=range(2, 60))
def speed(s: int, t: int) -> Question:
    return Question(f"A car goes {s} m in {t} s. What is its speed in m/s?", Fraction(s, t), "m/s")


@EASY.family(v=range(2, 60), t=range(2, 120), unit=("m/s", "km/h"))
def distance(v: int, t: int, unit: str) -> Question:
    length, time = ("m", "s") if unit == "m/s" else ("km", "h")
    return Question(f"How far does a car at {v} {unit} go in {t} {time}? Answer in {length}.", v * t, length)


@EASY.family(r=range(2, 200), i=range(1, 100), what=("voltage", "resistance", "current"))
def ohms_law(r: int, i: int, what: str) -> Question:
    if what == "voltage":
        return Question(f"A current of {i} A flows through {r} ohm. What is the voltage in V?", r * i, "V")
    if what == "resistance":
        return Question(
            f"A current of {i} mA flows at {r} V. What is the resistance in ohm?", Fraction(1000 * r, i), "ohm"
        )
    return Question(f"What current in A flows through {r} ohm at {i} V?", Fraction(i, r), "A")


@EASY.family(compound=tuple(COMPOUNDS), grams=range(2, 900), asked=("mol", "g"))
def moles(compound: str, grams: int, asked: str) -> Question:
    mass = COMPOUNDS[compound]
    if asked == "mol":
        return Question(f"How many mol are {grams} g of {compound} ({mass} g/mol)?", Fraction(grams, mass), "mol")
    return Question(f"How many g are {grams} mmol of {compound} ({mass} g/mol)?", Fraction(grams * mass, 1000), "g")


@EASY.family(grams=range(10, 900), volume=range(2, 90))
def density(grams: int, volume: int) -> Question:
    return Question(f"{grams} g fill {volume} cm^3. What is the density in g/cm^3?", Fraction(grams, volume), "g/cm^3")


@MEDIUM.family(tenths=range(2, 2000), pair=COMPOUND_CONVERSIONS)
def compound_units(tenths: int, pair: str) -> Question:
    return _converted(tenths, pair)


@MEDIUM.family(v=range(40), tenths=range(5, 60), t=range(2, 30), what=("speed", "distance"))
def acceleration(v: int, tenths: int, t: int, what: str) -> Question:
    a = Fraction(tenths, 10)
    start = f"A train at {v} m/s speeds up by {_short(a)} m/s^2 for {t} s."
    if what == "speed":
        return Question(f"{start} What is its speed then, in m/s?", v + a * t, "m/s")
    return Question(f"{start} How far does it go meanwhile, in m?", v * t + a * t * t / 2, "m")


@MEDIUM.family(v=range(18, 180, 3), tenths=range(10, 95))
def braking(v: int, tenths: int) -> Question:
    a, start = Fraction(tenths, 10), v * Fraction(5, 18)
    text = f"A car at {v} km/h brakes with {_short(a)} m/s^2. After how many m does it stand?"
    return Question(text, start * start / (2 * a), "m")


@MEDIUM.family(a=range(2, 100), b=range(2, 100), how=("series", "parallel"), u=range(2, 60))
def two_resistors(a: int, b: int, how: str, u: int) -> Question:
    whole = Fraction(a + b) if how == "series" else Fraction(a * b, a + b)
    return Question(
        f"Resistors of {a} ohm and {b} ohm are in {how} at {u} V. What is the whole current in A?", u / whole, "A"
    )


@MEDIUM.family(u=range(2, 240), r=range(2, 120), t=range(1, 60))
def electric_energy(u: int, r: int, t: int) -> Question:
    text = f"A heater of {r} ohm is at {u} V for {t} min. How much heat in kJ does it give?"
    return Question(text, Fraction(u * u * t * 60, r * 1000), "kJ")


@MEDIUM.family(reaction=REACTIONS, which=(0, 1), grams=range(2, 400))
def product_mass(reaction: tuple[tuple[str, int, int], ...], which: int, grams: int) -> Question:
    start, end = reaction[which], reaction[2]
    name = start[0].split(" ")[-1]
    text = (
        f"{_equation(reaction)}. How many g of {end[0].split(' ')[-1]} ({end[2]} g/mol) come from {grams} g of {name} "
        f"({start[2]} g/mol), with enough of the other?"
    )
    return Question(text, Fraction(grams * end[1] * end[2], start[1] * start[2]), "g")


def _equation(reaction: tuple[tuple[str, int, int], ...]) -> str:
    return f"{reaction[0][0]} + {reaction[1][0]} -> {reaction[2][0]}"


@MEDIUM.family(grams=range(50, 2000, 10), low=range(5, 40), rise=range(2, 60))
def heating(grams: int, low: int, rise: int) -> Question:
    text = f"How much heat in kJ brings {grams} g of water from {low} °C to {low + rise} °C? Take 4.2 J/(g K)."
    return Question(text, Fraction(42 * grams * rise, 10_000), "kJ")


@MEDIUM.family(c=range(1, 60), v=range(5, 100, 5), w=range(105, 1000, 5))
def dilution(c: int, v: int, w: int) -> Question:
    text = f"{v} mL of a solution of {c} mol/L are filled up with water to {w} mL. What is the concentration in mol/L?"
    return Question(text, Fraction(c * v, w), "mol/L")


@HARD.family(a=range(1, 6), t=range(3, 20), cruise=range(5, 60), b=range(1, 8))
def journey(a: int, t: int, cruise: int, b: int) -> Question:
    top = a * t
    text = (
        f"From rest, a train speeds up by {a} m/s^2 for {t} s, keeps its speed for {cruise} s, then brakes with {b} "
        "m/s^2 until it stands. How many m has it gone?"
    )
    return Question(text, Fraction(top * t, 2) + top * cruise + Fraction(top * top, 2 * b), "m")


@HARD.family(v=range(40, 110), faster=range(5, 60), minutes=range(5, 60))
def chase(v: int, faster: int, minutes: int) -> Question:
    text = (
        f"A truck leaves at {v} km/h. {minutes} min later a car follows from the same place at {v + faster} km/h. "
        "How many km from there does it catch up?"
    )
    return Question(text, Fraction(v * minutes, 60) / faster * (v + faster), "km")


@HARD.family(a=range(2, 60), b=range(2, 60), c=range(2, 60), u=range(2, 48))
def mixed_circuit(a: int, b: int, c: int, u: int) -> Question:
    parallel = Fraction(b * c, b + c)
    text = (
        f"{a} ohm is in series with a parallel pair of {b} ohm and {c} ohm, all at {u} V. "
        f"What current in A flows through the {b} ohm of the pair?"
    )
    return Question(text, u * parallel / (a + parallel) / b, "A")


@HARD.family(u=range(2, 60), inside=range(1, 20), r=range(1, 90))
def battery(u: int, inside: int, r: int) -> Question:
    current = Fraction(u * 10, inside + 10 * r)
    text = (
        f"A battery of {u} V with {_short(Fraction(inside, 10))} ohm inside feeds {r} ohm. What power in W goes to it?"
    )
    return Question(text, current * current * r, "W")


@HARD.family(reaction=REACTIONS, first=range(2, 120), second=range(2, 120))
def limiting_reagent(reaction: tuple[tuple[str, int, int], ...], first: int, second: int) -> Question:
    (name_0, n_0, m_0), (name_1, n_1, m_1), (name_2, n_2, m_2) = reaction
    runs = min(Fraction(first, n_0 * m_0), Fraction(second, n_1 * m_1))
    names = [name.split(" ")[-1] for name in (name_0, name_1, name_2)]
    text = (
        f"{_equation(reaction)}. At most how many g of {names[2]} ({m_2} g/mol) come from {first} g of {names[0]} "
        f"({m_0} g/mol) and {second} g of {names[1]} ({m_1} g/mol)?"
    )
    return Question(text, runs * n_2 * m_2, "g")


@HARD.family(a=range(50, 600, 10), low=range(5, 35), b=range(50, 600, 10), high=range(40, 95))
def mixing(a: int, low: int, b: int, high: int) -> Question:
    text = f"{a} g of water at {low} °C and {b} g at {high} °C are mixed. What is the temperature then, in °C?"
    return Question(text, Fraction(a * low + b * high, a + b), "°C")


@HARD.family(p=range(80, 300, 5), v=range(2, 40), t=range(250, 400, 10), w=range(3, 60), u=range(255, 420, 10))
def gas(p: int, v: int, t: int, w: int, u: int) -> Question:
    text = f"A gas of {p} kPa, {v} L and {t} K is brought to {w} L and {u} K. What is its pressure in kPa?"
    return Question(text, Fraction(p * v * u, t * w), "kPa")


@HARD.family(v=range(5, 60), c=range(2, 60), w=range(5, 60), acid=(("HCl", 1), ("H2SO4", 2), ("H3PO4", 3)))
def titration(v: int, c: int, w: int, acid: tuple[str, int]) -> Question:
    base = Fraction(c, 100)
    text = (
        f"{v} mL of {acid[0]} take {w} mL of NaOH of {_short(base)} mol/L until all of its {acid[1]} H+ are gone. "
        "What is the concentration of the acid in mol/L?"
    )
    return Question(text, base * w / v / acid[1], "mol/L")
