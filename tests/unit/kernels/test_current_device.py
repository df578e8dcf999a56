"""The GPU that a thread launches on."""

import pytest
import torch

from glm5.kernels.current_device import make_current


@pytest.mark.parametrize(("name", "want"), [("cpu", []), ("cpu:0", []), ("cuda", []), ("cuda:1", [1])])
def test_a_gpu_without_a_number_is_the_current_one(monkeypatch, name, want):
    """torch.cuda.set_device refuses it: an engine on "cuda" did not start."""
    made = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(torch._utils._get_device_index(device)))
    make_current(torch.device(name))
    assert made == want
