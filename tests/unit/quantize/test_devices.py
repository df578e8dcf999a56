"""Several devices: they share experts and samples, and what comes out is what one device gives."""

from dataclasses import replace

import pytest
import torch

from glm5.config.quantize import QuantizeConfig
from glm5.quantize import calibrate, job, run, weights
from glm5.quantize.run import quantize
from tests.support.checkpoints import read_tensors


@pytest.mark.parametrize("num_devices", [3])
def test_devices_share_experts_and_samples(small_bf16, tmp_path, monkeypatch, num_devices):
    given = {"model": str(small_bf16), "num_samples": 5, "sample_len": 24, "min_tokens": 2, "held_out_tokens": 0}
    given |= {"scheme": "w4a8"}

    def written(name: str) -> dict[str, torch.Tensor]:
        return read_tensors(quantize(QuantizeConfig.model_validate({**given, "out": str(tmp_path / name)})))

    monkeypatch.setattr(calibrate, "PACK_TOKENS", 24)  # a sample a pack
    monkeypatch.setattr(calibrate.packed, "__defaults__", (24,))
    monkeypatch.setattr(weights, "EXPERTS_AT_ONCE", 3)
    alone = written("one")
    prepare = job.prepare
    cpus = [torch.device("cpu")] * num_devices

    def several(*args):
        made = prepare(*args)
        return replace(made, run=replace(made.run, devices=cpus))

    monkeypatch.setattr(run, "prepare", several)
    together = written("several")
    assert alone.keys() == together.keys()
    for name, tensor in alone.items():
        assert torch.equal(tensor.view(torch.uint8), together[name].view(torch.uint8)), name
