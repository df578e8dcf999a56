"""What every op's front door shares: the error for an implementation name that does not exist; and no gradient."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from glm5.common.errors import TrainingError

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


def forward_only(op: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a function that has no gradient: TrainingError where one is asked for. Without it that would be a zero."""

    def decorate(run: Callable[P, R]) -> Callable[P, R]:
        @wraps(run)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch.is_grad_enabled():
                return run(*args, **kwargs)
            refuse_gradient(op, *args, *kwargs.values())
            with torch.no_grad():
                return run(*args, **kwargs)

        return checked

    return decorate


def refuse_gradient(op: str, *given: object) -> None:
    """TrainingError where a gradient of `given` is asked for: tensors, tuples of them, and anything else."""
    if torch.is_grad_enabled() and any(map(_asks, given)):
        raise TrainingError(
            f"{op} computes no gradient, and one is asked for; to train, run the model as glm5.load gives it; "
            "to infer, run this under torch.inference_mode()"
        )


def _asks(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, tuple) and any(map(_asks, value))
