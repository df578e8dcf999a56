"""Ranks that each hold their part of a model compute what the whole one does: prompts and drafts, every format."""

import pytest
import torch

from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.config.presets import preset
from glm5.model.packed import PackedView
from glm5.parallel.apply import connect
from glm5.parallel.group import ALONE
from glm5.testing.numerics import rel_rms
from tests.support.models import random_model
from tests.support.ranks import by_threads

# Sums over parts round elsewhere; FP8 activations of parts have scales of their own.
BUDGET = {"float32": 2e-6, "bfloat16": 5e-2, "fp8": 0.2}
# Parts for two ranks are whole blocks, or lie within one.
SIZES = {"moe_intermediate_size": 256, "intermediate_size": 512, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16}


# Of keys and experts nothing is left to choose: choices that are nearly equal turn out otherwise in 16 bits.
PLAIN = SIZES | {"index_topk": 64, "n_routed_experts": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """With choices, and without."""
    folder = tmp_path_factory.mktemp("apply")
    for name, sizes in (("choices", SIZES), ("plain", PLAIN)):
        save(random_model(7, preset("tiny").replace(**sizes)), folder / name, dtype="fp8")
    return folder


def computed(model):
    """Logits of two packed prompts, and of a draft behind each of their tokens."""
    ids = torch.arange(40) * 7 % 320
    view = PackedView([25, 15])
    with torch.inference_mode():
        hidden = model(ids, view)
        drafted, _ = model.draft(ids.roll(-1), hidden, view)
        return model.head(hidden), model.head(drafted)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_ranks_compute_what_one_does(checkpoints, kind, size):
    checkpoint = checkpoints / ("choices" if kind == "float32" else "plain")
    if kind == "fp8" and size == 4:
        pytest.skip("blocks of this model would be shared")
    dtype = "auto" if kind == "fp8" else kind
    want = computed(load(checkpoint, dtype))

    def work(group):
        model = load(checkpoint, dtype, shard=group.shard)
        connect(model, group)
        return computed(model)

    ranks = by_threads(size, work)
    for whole, *parts in zip(want, *ranks, strict=True):
        together = torch.cat(parts, dim=-1)
        assert rel_rms(together, whole.double()) < BUDGET[kind]
        assert rel_rms(together * 1.3, whole.double()) > BUDGET[kind]


def test_alone_nothing_changes(checkpoints):
    model = load(checkpoints / "plain")
    layers = list(model.model.layers)
    connect(model, ALONE)
    assert list(model.model.layers) == layers
    x = torch.randn(3, 64)
    assert ALONE.all_reduce(x) is x
    assert torch.equal(ALONE.all_gather(x)[0], x)
