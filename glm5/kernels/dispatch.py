"""What every op's front door shares: the table of its implementations, which `auto` chooses from; and no gradient."""

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
    """An implementation: `reason` is when to use it, for a person. `auto` takes it `on` a kind of machine, `when` that
    holds for what is given. `gradient`: only where one is asked for, or only where none is; None: in either case.

    `module`: its file, if that has another name; relative to the op's folder.
    """

    reason: str
    on: Machine = "any"
    when: Callable[..., bool] | None = None
    gradient: bool | None = None
    module: str | None = None


class Table:
    """The implementations of an op by name. `auto` takes the first that it may; those behind one that it may always
    take run only where they are named. What needs Triton is imported when it is first asked for, as Triton may be
    missing; all others at once, so that nothing is found out hours later."""

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
        """What `auto` may stand for there, in order; `gradient`: whether one is asked for, where that is known."""
        machine, found = machine_of(device, dtype), list[str]()
        for name, impl in self.impls.items():
            if impl.on in machine and (gradient is None or impl.gradient in (None, gradient)):
                found.append(name)
                if impl.when is None and impl.gradient in (None, gradient):
                    break
        return found

    def module(self, impl: str, x: Tensor, *given: Any) -> Any:
        """The file of the implementation called `impl`, which is never replaced. "auto": of the one that the rules lead
        to, by the machine that `x` is on and what else conditions look at. ValueError for a name that is not known."""
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
    """What `Impl.on` may say there. Kernels of our own compute nothing in float64."""
    kinds: set[Machine] = {"any"}
    if device.type in ("cpu", "cuda"):
        kinds.add("cpu" if device.type == "cpu" else "gpu")
    if dtype != torch.float64 and triton_support.supports(device):
        kinds |= {"triton"} if cuda_code.missing_on(device) else {"triton", "hopper"}
    return frozenset(kinds)


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
    if asks_gradient(*given):
        raise TrainingError(
            f"{op} computes no gradient, and one is asked for; to train, run the model as glm5.load gives it; "
            "to infer, run this under torch.inference_mode()"
        )


def asks_gradient(*given: object) -> bool:
    """Whether a gradient of any of these is asked for: tensors, tuples of them, and anything else."""
    return torch.is_grad_enabled() and any(map(_asks, given))


def _asks(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, tuple) and any(map(_asks, value))
