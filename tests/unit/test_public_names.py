"""The names that users write down do not change by the way."""

import difflib

from tests.public_names import GOLDEN, public_names


def test_public_names_are_the_agreed_ones():
    """A new name is a promise, one that goes breaks somebody's program: `python -m tests.public_names` writes the list
    anew; say why in the commit."""
    golden, names = GOLDEN.read_text(encoding="utf-8").splitlines(), public_names()
    assert names == golden, "\n".join(difflib.unified_diff(golden, names, GOLDEN.name, "the package", lineterm="", n=0))
