"""Modules that are called and found without `nn.Module`'s detours: of a small model on a CPU a tenth of a step."""

from functools import cache
from typing import Any

from torch import nn

from glm5.model.glm5 import Glm5
from glm5.model.moe import Router


def call_directly(model: Glm5) -> None:
    """Let calls of the modules be calls of `forward`, without hooks but for those of routers, and make parameters and
    modules plain attributes besides what they are. What is set later in their place is found like anywhere else. For
    models that only run from now on."""
    for module in model.modules():
        vars(module).update(module.named_parameters(recurse=False))
        vars(module).update({name: child for name, child in module.named_children() if not name.isdigit()})
        if not isinstance(module, Router | nn.ModuleList):
            module.__class__ = _direct(type(module))


@cache
def _direct(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"__call__": kind.forward})
