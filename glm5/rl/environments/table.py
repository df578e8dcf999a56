"""Environments by name; docs/rl-environments.md says what each asks.

A new one is a class of `protocol.py` and a line here.
"""

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

from glm5.common.errors import ConfigError
from glm5.rl.environments import harbor, reasoning, swe, verifiers
from glm5.rl.environments.boxes import NO_BOXES, Boxes
from glm5.rl.environments.coding import Coding
from glm5.rl.environments.digits import Digits
from glm5.rl.environments.grid import Grid
from glm5.rl.environments.guess import Guess
from glm5.rl.environments.instructions import Instructions
from glm5.rl.environments.kuhn import Kuhn
from glm5.rl.environments.mathematics import mathematics
from glm5.rl.environments.memory import Memory
from glm5.rl.environments.prompts import Prompts
from glm5.rl.environments.protocol import Environment
from glm5.rl.environments.science import science
from glm5.rl.environments.search import Search
from glm5.rl.environments.terminal import Terminal
from glm5.rl.environments.tiny_terminal import TinyTerminal
from glm5.rl.environments.tools import Tools

ENVIRONMENTS: dict[str, Callable[[Boxes], Environment]] = {
    "guess": lambda _: Guess(),
    "guess-crash": lambda _: Guess(can_crash=True),
    "reverse": lambda _: Digits("reverse"),
    "sort": lambda _: Digits("sort"),
    "kuhn": lambda _: Kuhn(),
    "grid": lambda _: Grid(),
    "tiny-terminal": lambda _: TinyTerminal(),
    "memory": lambda _: Memory(),
    "math": lambda _: mathematics(),
    "science": lambda _: science(),
    "code": Coding,
    "tools": Tools,
    "search": Search,
    "terminal": Terminal,
    "instructions": lambda _: Instructions(),
    "correctness": lambda _: Prompts("correctness"),
    "emotional": lambda _: Prompts("emotional"),
    "quality": lambda _: Prompts("quality"),
}
BY_PREFIX: dict[str, Callable[[str, Boxes], Environment]] = {
    reasoning.PREFIX: lambda name, _: reasoning.Reasoning(name),
    swe.PREFIX: swe.Software,
    harbor.PREFIX: harbor.Harbor,
    verifiers.PREFIX: lambda name, _: verifiers.Verifiers(name),
}


def make(name: str, boxes: Boxes = NO_BOXES) -> Environment:
    """The environment of that name; `boxes`: where it runs what the policy writes, if it does. Without, such episodes
    raise EpisodeFailed("sandbox"). Raises ConfigError, which names the nearest."""
    for prefix, environment in BY_PREFIX.items():
        if name.startswith(prefix):
            return environment(name.removeprefix(prefix), boxes)
    if ":" in name:
        return _imported(name)
    if name not in ENVIRONMENTS:
        near = get_close_matches(name, ENVIRONMENTS, n=1)
        all_names = ", ".join([*ENVIRONMENTS, *(f"{prefix}NAME" for prefix in BY_PREFIX), "package.module:name"])
        known = f"did you mean {near[0]}?" if near else f"known are {all_names}"
        raise ConfigError(f"no environment is called {name!r:.80}; {known}")
    return ENVIRONMENTS[name](boxes)


def _imported(name: str) -> Environment:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"environment {name!r:.80}: {type(error).__name__}: {error}; it must name a class or function without "
            "arguments as package.module:name, in a package that Python finds"
        ) from error
