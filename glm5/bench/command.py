"""Runs a benchmark file as a command (`python -m`): errors are one line on stderr, as those of `glm5`."""

import sys
from collections.abc import Callable

import torch

from glm5.common.errors import GlmError
from glm5.kernels.triton_support import installed


def command(main: Callable[[], int]) -> int:
    """The exit code of `main`; 1 for an error of files, models or machines, 130 for Ctrl-C."""
    try:
        return main()
    except (GlmError, OSError) as error:
        sys.stderr.write(f"glm5: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130


def need_gpus(who: str, number: int = 1) -> None:
    """Raises GlmError on a machine with fewer GPUs or without Triton. `who`: the subject of the message."""
    found = torch.cuda.device_count()
    if found < number or not installed():
        wanted = "an NVIDIA GPU" if number == 1 else f"{number} NVIDIA GPUs"
        here = f"{found or 'no'} GPUs" if installed() else f"{found or 'no'} GPUs and no Triton"
        raise GlmError(f"{who} needs {wanted} and Triton; this machine has {here}")
