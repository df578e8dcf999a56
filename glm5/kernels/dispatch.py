"""Dispatch of every op: the table of implementations from which `auto` chooses, and checks for gradients."""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from glm5.common.errors import TrainingError
from glm5.kernels import cuda_code, triton_support

P = ParamSpec("P")
R = TypeVar("R")
Machine = Literal["any", "cpu", "gpu", "triton", "hopper"]
TABLES: dict[str, "Table"] = {}  # of the ops that are imported, by name


class Impl(NamedTuple):
    """An implementation. `reason`: documentation of when it is used. `auto` takes it `on` a kind of machine, if `when`
    holds for the arguments. `gradient`: only if a gradient is required (True), only if not (False), or either (None).

    `module`: its module relative to the op's package, if it differs from the name.
    """

    reason: str
    on: Machine = "any"
    when: Callable[..., bool] | None = None
    gradient: bool | None = None
    module: str | None = None


class Table:
    """The implementations of an op by name. `auto` takes the first that applies; those after an unconditional one run
    only by name. Modules that need Triton are imported on first use, as Triton may be missing; others at once, so that
    errors show early."""

    def __init__(self, package: str, **impls: Impl):
        self.op, self.impls, self._package = package.rpartition(".")[2], impls, package
        self._modules: dict[str, Any] = {}
        self._on_cpu = self._rules(torch.device("cpu"), torch.float32)
        self._on_gpu: dict[tuple[torch.device, torch.dtype], list[_Rule]] = {}
        TABLES[self.op] = self
        for name, impl in impls.items():
            if impl.on not in ("triton", "hopper"):
                self._load(name)

    def candidates(self, device: torch.device, dtype: torch.dtype, *, gradient: bool | None = None) -> list[str]:
        """The implementations that `auto` may choose there, in order. `gradient`: whether one is required, if known."""
        machine, found = machine_of(device, dtype), list[str]()
        for name, impl in self.impls.items():
            if impl.on in machine and (gradient is None or impl.gradient in (None, gradient)):
                found.append(name)
                if impl.when is None and impl.gradient in (None, gradient):
                    break
        return found

    def module(self, impl: str, x: Tensor, *given: Any) -> Any:
        """The module of the implementation `impl`. "auto" chooses by the device and dtype of `x` and the conditions; an
        explicit name never falls back. Raises ValueError for an unknown name."""
        if impl == "auto":
            if x.is_cpu:
                rules = self._on_cpu
            elif (rules := self._on_gpu.get((x.device, x.dtype))) is None:
                rules = self._on_gpu[x.device, x.dtype] = self._rules(x.device, x.dtype)
            for name, when, gradient in rules:
                if gradient is not None and gradient != asks_gradient(x, *given):
                    continue
                if when is None or when(x, *given):
                    impl = name
                    break
        try:
            return self._modules[impl]
        except KeyError:
            return self._load(impl)

    def _load(self, impl: str) -> Any:
        if impl not in self.impls:
            raise ValueError(f"{self.op}: unknown impl {impl!r}, expected one of {', '.join(('auto', *self.impls))}")
        self._modules[impl] = import_module(f".{self.impls[impl].module or impl}", self._package)
        return self._modules[impl]

    def _rules(self, device: torch.device, dtype: torch.dtype) -> list["_Rule"]:
        names = self.candidates(device, dtype)
        return [(name, self.impls[name].when, self.impls[name].gradient) for name in names]


_Rule = tuple[str, Callable[..., bool] | None, bool | None]


@cache
def machine_of(device: torch.device, dtype: torch.dtype) -> frozenset[Machine]:
    """The values of `Impl.on` that apply there. Triton and CUDA kernels do not support float64."""
    kinds: set[Machine] = {"any"}
    if device.type in ("cpu", "cuda"):
        kinds.add("cpu" if device.type == "cpu" else "gpu")
    if dtype != torch.float64 and triton_support.supports(device):
        kinds |= {"triton"} if cuda_code.missing_on(device) else {"triton", "hopper"}
    return frozenset(kinds)


def without_gradient(run: Callable[P, R]) -> Callable[P, R]:
    """`torch.no_grad()` for a function, at no cost if gradients are off already: that decorator takes as long as three
    small ops."""

    @wraps(run)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with torch.no_grad():
            return run(*args, **kwargs)

    return wrapper


def forward_only(op: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a function without a gradient: raises TrainingError if one is required, which would silently be zero."""

    def decorate(run: Callable[P, R]) -> Callable[P, R]:
        @wraps(run)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch.is_grad_enabled():
                return run(*args, **kwargs)
            refuse_gradient(op, *args, *kwargs.values())
            with torch.no_grad():
                return run(*args, **kwargs)

        return wrapper

    return decorate


def refuse_gradient(op: str, *given: object) -> None:
    """Raises TrainingError if a gradient of `given` is required: tensors, tuples of them, and anything else."""
    if asks_gradient(*given):
        raise TrainingError(
            f"{op} computes no gradient, and one is asked for; to train, run the model as glm5.load gives it; "
            "to infer, run this under torch.inference_mode()"
        )


def asks_gradient(*given: object) -> bool:
    """Whether a gradient of any of these is required: tensors, tuples of them, and anything else."""
    return torch.is_grad_enabled() and any(map(_asks, given))


def _asks(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, tuple) and any(map(_asks, value))
