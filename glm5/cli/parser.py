"""argparse with one-line errors. It imports no config class, to keep `--help` fast."""

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from glm5.common.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse that raises `UsageError` instead of printing its usage, and never guesses from a prefix."""

    elsewhere: Mapping[str, str] = {}
    more_words = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see  {self.prog} --help")

    def flags(self) -> list[str]:
        """Every argument: flags by their names, positional ones in capitals."""
        names = [action.option_strings or [str(action.metavar)] for action in self._actions]
        return [name for group in names for name in group]

    def check_names(self, argv: Sequence[str]) -> None:
        """Refuse unknown flags, with the nearest known one, before argparse misreads their values."""
        for token in argv:
            if token == "--":
                return
            name = token.partition("=")[0]
            if not re.match(r"--?[A-Za-z]", name) or " " in name or name in self._option_string_actions:
                continue
            if name in self.elsewhere:
                raise UsageError(f"{self.prog} has no flag {name}: {self.elsewhere[name]}")
            near = difflib.get_close_matches(name, list(self._option_string_actions), n=1)
            hint = f"did you mean {near[0]}?" if near else f"see  {self.prog} --help"
            raise UsageError(f"{self.prog} has no flag {name}; {hint}")

    def refuse_words(self, words: Sequence[str]) -> NoReturn:
        """Raise UsageError for words that no argument takes."""
        hint = self.more_words or f"see  {self.prog} --help"
        raise UsageError(f"{self.prog} takes no {' '.join(map(repr, words)):.80}; {hint}")
