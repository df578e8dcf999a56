"""Which arithmetic the layers of a model run in, and a key of it: equal keys, equal bits of a deterministic engine."""

import torch

from glm5.config.tensors import count_parameters
from glm5.engine.runner.native import use_native
from glm5.kernels import cpu_layer, native_code
from glm5.kernels.invariant import pass_rows
from glm5.model.glm5 import Glm5

# Below this many active parameters a second thread costs torch more than it gains (the demo model: 0.6 M). Native code
# divides the rows of a step instead, if there are enough.
ONE_THREAD = 50e6


def runs_native(model: Glm5, *, by_layer: bool = False) -> bool:
    """Use native layers if they can be used here: only for small models, whose weights they copy. `by_layer`: as in
    `use_native`."""
    return count_parameters(model.cfg).active < ONE_THREAD and use_native(model, by_layer=by_layer)


def arithmetic_of(model: Glm5, *, is_native: bool) -> str:
    """Native code: dtype and compiled code. Otherwise: dtype, the GPU model, or the CPU model with its capability and
    threads; and the rows of a pass."""
    device = model.device
    if is_native:
        return f"{model.dtype}, native code {cpu_layer.identity()}"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        capability, num_threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
        machine = f"{native_code.processor()}, {capability}, {num_threads} threads"
    return f"{model.dtype}, {machine}, passes of {pass_rows(device)} rows"
