"""How many GPU kernels this process has made ready: compiled, or fetched from the cache on disk.

Either takes long enough that whoever serves wants none of it: `built_late` should stay 0.
"""

import logging

from glm5.kernels.triton_support import installed

logger = logging.getLogger(__name__)

_built = _before_ready = 0
_is_ready = False


def start_counting() -> None:
    """From now on, until `mark_ready` as in time; without Triton there is nothing to count."""
    global _is_ready
    _is_ready = False
    if not installed():
        return
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = lambda **about: count(getattr(about.get("fn"), "name", "unknown"))


def mark_ready() -> int:
    """Whatever comes from now on comes late. How many came before."""
    global _before_ready, _is_ready
    _before_ready, _is_ready = _built, True
    return _built


def built_late() -> int:
    """Kernels made ready since `mark_ready`."""
    return _built - _before_ready


def count(name: str) -> None:
    """A kernel was made ready."""
    global _built
    _built += 1
    if _is_ready:
        logger.warning("a GPU kernel was made ready after the start: %s", name)
