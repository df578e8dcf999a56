"""The inference form on a GPU against the model's own modules in their reference implementations, at GLM-5's widths.

One rank's shape of eight (8 heads, an eighth of every expert), six layers, three of them with experts. Prompts, then
decoding rows. Routing and selection are the reference's own where they are forced; where not, flips are counted.
"""

import pytest

from glm5.bench.steps.case import rank_config, with_codes
from glm5.checkpoint.dummy import dummy
from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.kernels import triton_support
from tests.support.choices import MAX_LEN, Choices, exact, logits_of
from tests.support.dispatch import as_on
from tests.support.steps import far

pytestmark = pytest.mark.gpu

# The truth is float32 arithmetic on the same weights. Rounding to bfloat16, or to FP8 where products or the cache ask
# for it, takes the model's own modules away from it by about as much: the inference form may be no further.
MARGIN = 1.1
TOP_K = 128


@pytest.fixture
def references(monkeypatch):
    """While asked for, `auto` never means Triton."""

    def use(on: bool):
        monkeypatch.undo()
        if on:
            as_on(monkeypatch)
            monkeypatch.setattr(triton_support, "supports", lambda _: False)

    return use


def model_of(weights):
    """`weights`: bfloat16, fp8, or a recipe's name."""
    cfg = rank_config(8, 6).replace(index_topk=TOP_K)
    cfg = with_codes(cfg, weights) if weights.startswith("w") else cfg
    return dummy(cfg, fp8=weights != "bfloat16", device="cuda", seed=1)


@pytest.mark.parametrize("layout", ["auto", "fp8"])
@pytest.mark.parametrize("weights", ["bfloat16", "fp8", "w4a8-channel", "w4a8-group"])
def test_logits_are_those_of_the_reference(references, weights, layout):
    model, choices = model_of(weights), Choices()
    references(on=True)
    truth = exact(model)
    want = logits_of(truth, truth, "auto", choices, "take_down")
    del truth
    own = logits_of(model, model, layout, choices, "force")
    references(on=False)
    lowered = FusedModel(model, MAX_LEN)
    forced = logits_of(lowered.hidden, model, layout, choices, "force")
    flips = sum(choices.flips) / len(choices.flips)
    free = logits_of(lowered.hidden, model, layout, choices, None)
    theirs = [far(got, right) for got, right in zip(own, want, strict=True)]
    actual = [far(got, right) for got, right in zip(forced, want, strict=True)]
    apart = [far(got, right) for got, right in zip(forced, own, strict=True)]
    kl = [
        float((right.softmax(-1) * (right.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean())
        for got, right in zip(free, want, strict=True)
    ]
    print(
        f"FIGURES weights {weights}, cache {layout}: modules {rounded(theirs)}, inference form {rounded(actual)}, apart"
    )
    print(f"FIGURES {rounded(apart)}; places with another choice {flips:.4f}, KL unforced {rounded(kl)}")
    assert all(got < MARGIN * bound for got, bound in zip(actual, theirs, strict=True))


def rounded(values):
    return [float(f"{value:.2g}") for value in values]


def test_the_bound_notices_a_wrong_scale(references):
    model, choices = model_of("bfloat16"), Choices()
    references(on=True)
    truth = exact(model)
    want = logits_of(truth, truth, "auto", choices, "take_down")
    own = logits_of(model, model, "auto", choices, "force")
    references(on=False)
    lowered = FusedModel(model, MAX_LEN)
    for layer in lowered.layers:
        layer.attention.w_v_HCV.mul_(1.05)
    got = logits_of(lowered.hidden, model, "auto", choices, "force")
    pairs = zip(got, own, want, strict=True)
    assert all(far(actual, right) > MARGIN * far(theirs, right) for actual, theirs, right in pairs)
