"""Counts the GPU kernels that this process has compiled or loaded from the cache on disk.

Either would delay requests of a server, so `built_late` should stay 0.
"""

import logging

from glm5.kernels.triton_support import installed

logger = logging.getLogger(__name__)

_built = _before_ready = 0
_is_ready = False


def start_counting() -> None:
    """Start counting Triton's kernels. Without Triton there is nothing to count."""
    global _is_ready
    _is_ready = False
    if not installed():
        return
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = lambda **about: count(getattr(about.get("fn"), "name", "unknown"))


def mark_ready() -> int:
    """Later kernels count as late. Returns the number of earlier ones."""
    global _before_ready, _is_ready
    _before_ready, _is_ready = _built, True
    return _built


def built_late() -> int:
    """Kernels compiled or loaded since `mark_ready`."""
    return _built - _before_ready


def count(name: str) -> None:
    """Count a kernel."""
    global _built
    _built += 1
    if _is_ready:
        logger.warning("a GPU kernel was made ready after the start: %s", name)
