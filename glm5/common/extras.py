"""Optional dependencies: named where they are needed, and nowhere else."""

import importlib
from types import ModuleType

from glm5.common.errors import MissingExtra


def require(module: str, extra: str) -> ModuleType:
    """The imported `module`, or MissingExtra naming the pip command for the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as err:
        if err.name is not None and err.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the package is there but broken: its own message is the useful one
        message = f"this needs the package {module.partition('.')[0]!r}: run  pip install 'glm5[{extra}]'"
        raise MissingExtra(message, name=module) from err
