"""What every op's front door shares: the error for an implementation name that does not exist; and no gradient."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def unknown_impl(op: str, impl: str, allowed: tuple[str, ...]) -> ValueError:
    """The error to raise when `impl` is not one of `allowed`."""
    return ValueError(f"{op}: unknown impl {impl!r}, expected one of {', '.join(('auto', *allowed))}")


def without_gradient(run: Callable[P, R]) -> Callable[P, R]:
    """`torch.no_grad()` for a function, at no cost where no gradient is asked for anyway: that decorator takes as long
    as three small operations."""

    @wraps(run)
    def lean(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with torch.no_grad():
            return run(*args, **kwargs)

    return lean
