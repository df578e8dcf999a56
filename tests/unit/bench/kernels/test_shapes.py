"""The sizes that are measured are those that the engine multiplies."""

from importlib import import_module

import pytest
import torch

from glm5.bench.kernels import PARTS, quantized
from glm5.bench.kernels.shapes import RANKS, quantized_linears
from glm5.bench.steps.case import rank_config, with_codes
from glm5.checkpoint.formats import stored_of
from glm5.checkpoint.load import empty_model
from glm5.checkpoint.stored import weight_formats
from glm5.engine.runner.fused.fused_model import FusedLayer, FusedMLP
from glm5.model.linear import QuantizedLinear

META = torch.device("meta")


def sizes(linears, rows):
    """(rows, cols) of the product of `linears`, if they are codes."""
    return {(rows, linear.weight.shape[1]) for linear in linears[:1] if isinstance(linear, QuantizedLinear)}


@pytest.mark.parametrize("ranks", RANKS)
def test_products_of_codes(ranks):
    cfg = with_codes(rank_config(ranks, 4), "w4a8-channel")
    model = empty_model(cfg, frozenset(), torch.bfloat16, META, weight_formats(stored_of(cfg), cfg, META))
    found = set()
    for layer in (FusedLayer(model.model.layers[layer_idx]) for layer_idx in (0, 3)):
        mlp = layer.mlp if isinstance(layer.mlp, FusedMLP) else layer.mlp.shared_mlp
        for stack in (*layer.attention.stacks, *mlp.stacks):
            for run in stack.runs:
                found |= sizes(stack.linears[run.start :], sum(stack.rows[run.start : run.stop]))
        for linear in (layer.attention.module.q_b_proj, layer.attention.module.o_proj, mlp.module.down_proj):
            found |= sizes([linear], linear.weight.shape[0])
    assert {(weight.rows, weight.cols) for weight in quantized_linears(ranks)} == found


def test_every_implementation_is_measured():
    """A step's tokens by each, more by the one that takes them."""
    names = {case.name for case in quantized.cases()}
    shape = "quantized_linear o 6144x4096 tp4 M="
    assert {f"{shape}128 w8a8 triton", f"{shape}128 w8a8 cuda", f"{shape}512 w8a8 triton"} <= names
    assert f"{shape}512 w8a8 cuda" not in names


def test_every_file_that_is_named_has_cases():
    for part in PARTS:
        assert callable(import_module(f"glm5.bench.kernels.{part}").cases), part
