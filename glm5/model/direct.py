"""Modules that are called without detours: no hooks. A small layer on a CPU takes hardly longer than the detour."""

from typing import Any, NoReturn

from torch import nn


class Direct(nn.Module):
    """Calling it is calling `forward`. It takes no hooks, which would not be run."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def register_forward_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} runs no hooks (it is called directly): hook the module around it")

    register_forward_pre_hook = register_forward_hook
