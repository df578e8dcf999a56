"""Floats that are pushed into a quantized model become the codes and scales that `glm5 quantize` makes of them."""

import pytest

from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.common.errors import CheckpointError
from glm5.config.quantize import QuantizeConfig
from glm5.parallel.table import Shard
from glm5.quantize.run import quantize
from tests.support.models import random_model
from tests.support.pushes import Sender, same_bits
from tests.unit.quantize.test_refused import W4A8

RECIPES = {
    "w4a8": {"recipe": "w4a8.toml", "target": "glm5"},
    "w4a16 vllm": {"scheme": "w4a16", "target": "vllm", "method": "minmax"},
}


@pytest.mark.parametrize(("name", "size"), [("w4a8", 2), ("w4a16 vllm", 1)])
def test_floats_become_the_codes_of_the_quantizer(small_bf16, tmp_path, name, size):
    (tmp_path / "w4a8.toml").write_text(W4A8)
    plain = load(small_bf16)
    new = save(random_model(7, plain.cfg), tmp_path / "new", dtype="bfloat16")
    settings = {"device": "cpu", "num_samples": 2, "sample_len": 16, "min_tokens": 1, "held_out_tokens": 0}
    settings |= RECIPES[name]
    if "recipe" in settings:
        settings["recipe"] = str(tmp_path / settings["recipe"])
    folders = [
        quantize(QuantizeConfig.model_validate(settings | {"model": str(source), "out": str(tmp_path / out)}))
        for source, out in ((small_bf16, "old quantized"), (new, "new quantized"))
    ]
    for rank in range(size):
        old, want = (load(folder, shard=Shard(rank, size)) for folder in folders)
        assert not same_bits(old, want)
        Sender(old, load(new).state_dict(), Shard(rank, size)).send_all()
        assert same_bits(old, want)
    old.mtp.add_rotations()
    with pytest.raises(CheckpointError, match="was rotated before the model in use was quantized; give its codes"):
        Sender(old, load(new).state_dict(), Shard(rank, size))
