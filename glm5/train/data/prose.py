"""Words, names and filler sentences of generated tasks, drawn with a `Random`."""

from random import Random
from uuid import UUID


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words(
    """
    amber ancient bitter brave bright broken calm clever cold crimson curious damp dark deep distant dusty eager
    early empty faint fancy fierce gentle golden grand green grey happy heavy hidden hollow humble icy idle
    jolly keen large late lazy light little lively lonely loud lucky mellow mild misty modest narrow noble noisy
    odd pale patient plain polite proud quick quiet rapid rare red restless rough royal rusty sandy scarlet
    secret shallow sharp shiny silent silver simple slender slow small smooth solid spare steady still stormy
    strange strong sudden sunny swift tall tame tender thin tidy tiny tough vast velvet warm weary wide wild
    windy wise wooden young
    """
)
NOUNS = _words(
    """
    acorn anchor apple arrow badge barrel basket beacon bell bench blanket boat bottle branch bridge brook broom
    bucket button cabin cactus candle canyon carpet castle cellar chair chimney circle cliff clock cloud coast
    coin compass copper cottage crown desert dragon drum eagle echo ember engine falcon feather fence field
    flute forest fountain garden gate glacier glass hammer harbor harp hill horizon island ivory jacket jewel
    kettle key kite ladder lagoon lake lantern leaf lemon lighthouse lily map marble market meadow mill mirror
    mountain needle nest oak oar ocean orchard otter owl paddle palace parrot path pearl pebble pencil piano
    pillow pine planet plum pond quarry quill raven ribbon river robin rocket rope saddle sail scarf shell shore
    spoon stable statue stone summit table temple thimble thunder tower trail tulip valley violin wagon walnut
    whistle willow window winter zebra
    """
)
_VERBS = _words(
    """
    crosses follows guards hides holds leaves lights meets misses needs passes reaches sees warms watches
    """
)
_PREPOSITIONS = _words(
    """
    above across behind below beside near over under
    """
)
_FIRST = _words(
    """
    Ada Bela Clara Dora Emil Fiona Gustav Hanna Ivo Jana Karl Lena Milo Nora Oskar Paula Quinn Rosa Sven Tilda
    Ugo Vera Willa Xenia Yara Zeno
    """
)
_SYLLABLES = _words(
    """
    ba be bo da de do ka ke ko la le lo ma me mo na ne no ra re ro sa se so ta te to va ve vo
    """
)

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def sentence(rng: Random) -> str:
    """One sentence of prose without any fact."""
    first, second, third = (f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(3))
    return f"{first.capitalize()} {rng.choice(_VERBS)} {second} {rng.choice(_PREPOSITIONS)} {third}."


def words(rng: Random, count: int) -> list[str]:
    """Different words such as brave-acorn; there are more than 10,000."""
    picked = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [f"{ADJECTIVES[i % len(ADJECTIVES)]}-{NOUNS[i // len(ADJECTIVES)]}" for i in picked]


def numbers(rng: Random, count: int, digits: int = 7) -> list[str]:
    """Different numbers, none of which begins with 0."""
    return [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def uuids(rng: Random, count: int) -> list[str]:
    return [str(UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def names(rng: Random, count: int) -> list[str]:
    """Different names of people, invented."""
    return [f"{_FIRST[i % len(_FIRST)]} {_coined(i // len(_FIRST))}" for i in _picked(rng, count, len(_FIRST))]


def places(rng: Random, count: int, ending: str) -> list[str]:
    """Different invented names of towns or firms."""
    return [_coined(i) + ending for i in _picked(rng, count, 1)]


def letters(rng: Random, count: int, length: int, alphabet: str) -> list[str]:
    """Different strings of letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(alphabet, k=length))] = None
    return list(found)


def _picked(rng: Random, count: int, times: int) -> list[int]:
    return rng.sample(range(times * len(_SYLLABLES) ** 3), count)


def _coined(i: int) -> str:
    n = len(_SYLLABLES)
    return "".join(_SYLLABLES[i // n**k % n] for k in range(3)).capitalize()
