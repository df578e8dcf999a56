"""Environments by name.

guess, guess-crash, reverse, sort, kuhn, grid      small ones, whose optimum is known
package.module:name                                one of your own: a class or function without arguments
"""

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

from glm5.common.errors import ConfigError
from glm5.rl.environments.digits import Digits
from glm5.rl.environments.grid import Grid
from glm5.rl.environments.guess import Guess
from glm5.rl.environments.kuhn import Kuhn
from glm5.rl.environments.protocol import Environment

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "guess": Guess,
    "guess-crash": lambda: Guess(can_crash=True),
    "reverse": lambda: Digits("reverse"),
    "sort": lambda: Digits("sort"),
    "kuhn": Kuhn,
    "grid": Grid,
}


def make(name: str) -> Environment:
    """The environment of that name. Raises ConfigError, which names the nearest."""
    if ":" in name:
        return _imported(name)
    if name not in ENVIRONMENTS:
        near = get_close_matches(name, ENVIRONMENTS, n=1)
        known = f"did you mean {near[0]}?" if near else f"known are {', '.join(ENVIRONMENTS)}, or package.module:name"
        raise ConfigError(f"no environment is called {name!r:.80}; {known}")
    return ENVIRONMENTS[name]()


def _imported(name: str) -> Environment:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"environment {name!r:.80}: {type(error).__name__}: {error}; it must name a class or function without "
            "arguments as package.module:name, in a package that Python finds"
        ) from error
