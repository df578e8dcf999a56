"""The inference form on a GPU against the model's own modules in their reference implementations, at GLM-5's widths.

One rank's shape of eight (8 heads, an eighth of every expert), six layers, three of them with experts. Prompts, then
decoding rows. Routing and selection are the reference's own where they are forced; where not, flips are counted.
"""

import pytest
import torch

from glm5.bench.steps.case import rank_config
from glm5.checkpoint.dummy import dummy
from glm5.engine.lower import Lowered
from glm5.kernels import grouped_experts, triton_support
from glm5.kernels.block_scaled import BlockScaled
from glm5.model.glm5 import Glm5
from glm5.model.moe import MoE
from tests.support.steps import Steps, far, random_ids

pytestmark = pytest.mark.gpu

# The truth is float32 arithmetic on the same weights. Rounding to bfloat16, or to FP8 where products or the cache ask
# for it, takes the model's own modules away from it by about as much: the inference form may be no further.
MARGIN = 1.1
LENGTH, TOP_K = 300, 128
PASSES = [[(0, 0, LENGTH), (1, 0, 200)], [(0, LENGTH, 1), (1, 200, 1)], [(0, LENGTH + 1, 3), (1, 201, 20)]]


class Choices:
    """What a model chose, layer by layer and pass by pass: taken down, or forced on another."""

    def __init__(self):
        self.routing, self.keys = [], []

    def take_down(self, model, cache):
        for gate in gates_of(model):
            route = gate.forward
            gate.forward = lambda x, r=route: self.note(self.routing, r(x))
        select = cache.select_keys
        cache.select_keys = lambda *args, **kwargs: self.note(self.keys, select(*args, **kwargs))

    def force(self, model, cache):
        routing, keys, self.flips = iter(self.routing), iter(self.keys), []
        for gate in gates_of(model):
            route = gate.forward
            gate.forward = lambda x, r=route: self.instead(next(routing), r(x), 1)
        select = cache.select_keys
        cache.select_keys = lambda *args, **kwargs: self.instead(next(keys), select(*args, **kwargs), None)

    def instead(self, forced, own, index):
        left, right = (forced, own) if index is None else (forced[index], own[index])
        self.flips.append(float((left != right).float().mean()))
        return forced

    @staticmethod
    def note(heard, value):
        heard.append(value)
        return value


def gates_of(model):
    return [layer.mlp.gate for layer in model.model.layers if isinstance(layer.mlp, MoE)]


@pytest.fixture
def references(monkeypatch):
    """While asked for, `auto` never means Triton."""

    choose = grouped_experts._choose

    def use(on: bool):
        monkeypatch.setattr(grouped_experts, "_choose", (lambda *_: "reference") if on else choose)
        monkeypatch.setattr(triton_support, "installed", (lambda: False) if on else (lambda: True))

    return use


def model_of(fp8):
    cfg = rank_config(8, 6).replace(index_topk=TOP_K)
    return dummy(cfg, fp8=fp8, device="cuda", seed=1)


def exact(model):
    """The same weights in float32, dequantized where they are FP8."""
    with torch.device("meta"):
        other = Glm5(model.cfg.replace(quantization_config=None))
    weights = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("_scale_inv"):
            continue
        scale = model.state_dict().get(name + "_scale_inv")
        weights[name] = tensor.float() if scale is None else BlockScaled(tensor, scale).dequantize(torch.float32)
    other.load_state_dict(weights, assign=True)
    return other.eval()


def logits_of(run, model, layout, choices, way):
    steps = Steps(model, 2, 448, layout)
    forwards = {gate: gate.forward for gate in gates_of(model)}
    if way is not None:
        getattr(choices, way)(model, steps.cache)
    out = []
    with torch.inference_mode():
        for number, rows in enumerate(PASSES):
            ids = random_ids(model, sum(count for _, _, count in rows) + 2, seed=number)
            out.append(model.head(run(ids, steps.view(rows, padding=2))[:-2]).float())
    for gate, forward in forwards.items():
        gate.forward = forward
    return out


@pytest.mark.parametrize("layout", ["auto", "fp8"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8 weights"])
def test_logits_are_those_of_the_reference(references, fp8, layout):
    model, choices = model_of(fp8), Choices()
    references(on=True)
    truth = exact(model)
    want = logits_of(truth, truth, "auto", choices, "take_down")
    del truth
    own = logits_of(model, model, layout, choices, "force")
    references(on=False)
    lowered = Lowered(model, 512)
    forced = logits_of(lowered.hidden, model, layout, choices, "force")
    flips = sum(choices.flips) / len(choices.flips)
    free = logits_of(lowered.hidden, model, layout, choices, None)
    theirs = [far(got, right) for got, right in zip(own, want, strict=True)]
    mine = [far(got, right) for got, right in zip(forced, want, strict=True)]
    apart = [far(got, right) for got, right in zip(forced, own, strict=True)]
    kl = [
        float((right.softmax(-1) * (right.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean())
        for got, right in zip(free, want, strict=True)
    ]
    print(
        f"FIGURES fp8 weights {fp8}, cache {layout}: modules {rounded(theirs)}, inference form {rounded(mine)}, apart"
    )
    print(f"FIGURES {rounded(apart)}; places with another choice {flips:.4f}, KL unforced {rounded(kl)}")
    assert all(got < MARGIN * bound for got, bound in zip(mine, theirs, strict=True))


def rounded(values):
    return [float(f"{value:.2g}") for value in values]


def test_the_bound_notices_a_wrong_scale(references):
    model, choices = model_of(fp8=False), Choices()
    references(on=True)
    truth = exact(model)
    want = logits_of(truth, truth, "auto", choices, "take_down")
    own = logits_of(model, model, "auto", choices, "force")
    references(on=False)
    lowered = Lowered(model, 512)
    for layer in lowered.layers:
        layer.attention.w_v_HCV.mul_(1.05)
    got = logits_of(lowered.hidden, model, "auto", choices, "force")
    pairs = zip(got, own, want, strict=True)
    assert all(far(mine, right) > MARGIN * far(theirs, right) for mine, theirs, right in pairs)
