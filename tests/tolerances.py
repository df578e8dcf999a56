"""A plugin of pytest (-p tests.tolerances) that leaves the tests which compare with a tolerance.

A test does if it, or a function of its file that it names, says one of the words that such comparisons are made of.
"""

import inspect
import re
from types import FunctionType

WORDS = re.compile(
    r"rel_rms|allclose|assert_close|approx|rounding|\de-\d|"
    r"BUDGET|CLOSE|EXACT|FLOAT32|LAST_PLACES|ROUNDING|SAME_ERROR|TOLERANCE|UNCHANGED"
)


def pytest_collection_modifyitems(config, items):
    kept = [item for item in items if compares(item.function)]
    config.hook.pytest_deselected(items=[item for item in items if not compares(item.function)])
    items[:] = kept


def compares(test: FunctionType) -> bool:
    named = (test.__globals__.get(name) for name in names(test.__code__))
    helpers = [one for one in named if isinstance(one, FunctionType) and one.__module__ == test.__module__]
    return any(WORDS.search(inspect.getsource(one)) for one in (test, *helpers))


def names(code) -> set[str]:
    """Also of functions inside it."""
    inner = (one for one in code.co_consts if inspect.iscode(one))
    return set(code.co_names).union(*map(names, inner))
