"""A model's choices of experts and keys, taken down and forced on another; the same weights in float32; logits of
passes over prompts and then some rows."""

import torch

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.quantized_weight import QuantizedWeight
from glm5.model.experts import QuantizedExperts
from glm5.model.glm5 import Glm5
from glm5.model.linear import QuantizedLinear
from glm5.model.moe import MoE
from glm5.parallel.table import UNSHARDED
from tests.support.steps import Steps, random_ids

LENGTH = 310  # with 200 others and padding, enough rows to be dealt out to ranks
PASSES = [[(0, 0, LENGTH), (1, 0, 200)], [(0, LENGTH, 1), (1, 200, 1)], [(0, LENGTH + 1, 3), (1, 201, 20)]]
MAX_LEN = 512


class Choices:
    """What a model chose, layer by layer and pass by pass: taken down, or forced on another, of which `shard` may see
    its share of the rows alone."""

    def __init__(self, shard=UNSHARDED):
        self.shard = shard
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
            gate.forward = lambda x, r=route: self.instead(self.share(next(routing), len(x)), r(x), 1)
        select = cache.select_keys

        def selected(*args, **kwargs):
            own = select(*args, **kwargs)
            (forced,) = self.share((next(keys),), len(own))
            return self.instead(forced, own, None)

        cache.select_keys = selected

    def instead(self, forced, own, index):
        left, right = (forced, own) if index is None else (forced[index], own[index])
        self.flips.append(float((left != right).float().mean()))
        return forced

    def share(self, chosen, count):
        rank, size = self.shard
        return chosen if count == len(chosen[0]) else tuple(each.unflatten(0, (size, -1))[rank] for each in chosen)

    @staticmethod
    def note(received, value):
        received.append(value)
        return value


def gates_of(model):
    return [layer.mlp.gate for layer in model.model.layers if isinstance(layer.mlp, MoE)]


def exact(model):
    """The same weights in float32, dequantized where they are FP8 or codes."""
    with torch.device("meta"):
        other = Glm5(model.cfg.replace(quantization_config=None))
    weights, stored, quantized = {}, model.state_dict(), quantized_of(model)
    for name, tensor in stored.items():
        if name.endswith(("_scale_inv", "_scale")):
            continue
        scale = stored.get(name + "_scale_inv")
        if scale is not None:
            weights[name] = BlockScaled(tensor, scale).dequantize(torch.float32)
        else:
            weights[name] = quantized[name].dequantize(torch.float32) if name in quantized else tensor.float()
    other.load_state_dict(weights, assign=True)
    return other.eval()


def quantized_of(model):
    """Weights that are codes, by name."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            found[f"{path}.weight"] = module.quantized_weight
        elif isinstance(module, QuantizedExperts):
            for leaf in ("gate_up_proj", "down_proj"):
                found[f"{path}.{leaf}"] = QuantizedWeight(
                    getattr(module, leaf), getattr(module, f"{leaf}_scale"), module.format
                )
    return found


def logits_of(run, model, layout, choices, way, head=None):
    """Of each pass, by `run`, a model's forward. `way`: "take_down", "force" or None."""
    head = model.head if head is None else head
    steps = Steps(model, 2, 448, layout)
    forwards = {gate: gate.forward for gate in gates_of(model)}
    if way is not None:
        getattr(choices, way)(model, steps.cache)
    out = []
    with torch.inference_mode():
        for number, rows in enumerate(PASSES):
            ids = random_ids(model, sum(count for _, _, count in rows) + 2, seed=number)
            out.append(head(run(ids, steps.view(rows, padding=2))[:-2]).float())
    for gate, forward in forwards.items():
        gate.forward = forward
    return out
