"""Floats that are pushed into a quantized model become the codes and scales that `glm5 quantize` makes of them."""

from pathlib import Path

import pytest

from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.common.errors import CheckpointError
from glm5.config.quantize import QuantizeConfig
from glm5.parallel.table import Shard
from glm5.quantize.recipe import as_they_are
from glm5.quantize.run import quantize
from tests.support.models import random_model
from tests.support.pushes import Sender, same_bits


@pytest.mark.parametrize(
    ("scheme", "options", "size"),
    [
        ("w4a8", {}, 2),
        pytest.param("w4a8", {"w4a8_weights": "group"}, 1, marks=pytest.mark.slow),
        pytest.param("w4a16", {"target": "vllm"}, 1, marks=pytest.mark.slow),
    ],
)
def test_floats_become_the_codes_of_the_quantizer(small_bf16, tmp_path, scheme, options, size):
    new = save(random_model(7, load(small_bf16).cfg), tmp_path / "new", dtype="bfloat16")
    folders: list[Path] = []
    for source in (small_bf16, new):
        given = {"model": str(source), "out": str(tmp_path / f"{source.name} quantized"), "device": "cpu"}
        given |= {"scheme": scheme, "method": "minmax", "held_out_tokens": 0, **options}
        settings = QuantizeConfig.model_validate(given)
        folders.append(quantize(settings, resolved=as_they_are(settings)))
    for rank in range(size):
        old, want = (load(folder, shard=Shard(rank, size)) for folder in folders)
        assert not same_bits(old, want)
        Sender(old, load(new).state_dict(), Shard(rank, size)).send_all()
        assert same_bits(old, want)
    old.mtp.add_rotations()
    with pytest.raises(CheckpointError, match="was rotated before the model in use was quantized; give its codes"):
        Sender(old, load(new).state_dict(), Shard(rank, size))
