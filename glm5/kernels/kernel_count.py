"""How many Triton kernels this process has made ready: compiled, or fetched from the cache on disk.

Either takes long enough that whoever serves wants none of it: `built_late` should stay 0.
"""

from typing import Any

from glm5.kernels.triton_support import installed

_built = _before_ready = 0


def start_counting() -> None:
    """From now on; without Triton there is nothing to count."""
    if not installed():
        return
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = _note


def mark_ready() -> int:
    """Whatever comes from now on comes late. How many came before."""
    global _before_ready
    _before_ready = _built
    return _built


def built_late() -> int:
    """Kernels made ready since `mark_ready`."""
    return _built - _before_ready


def _note(**_about: Any) -> None:
    global _built
    _built += 1
