"""A policy's training step on a GPU: figures and gradients of all five streams as on the CPU."""

import copy

import pytest
import torch
from torch import Tensor

from glm5.config.model import ModelConfig
from glm5.config.step import OptimizerConfig
from glm5.kernels.sampled_logprobs import bits_of, recorded
from glm5.model.glm5 import Glm5
from glm5.rl.algorithms.table import PRESETS
from glm5.rl.training.objective import Coefficients, RLObjective
from glm5.rl.training.packing import batches_of, pack
from glm5.rl.training.policy import policy_step, with_logprobs
from glm5.testing.numerics import rel_rms
from tests.support.masks import kept_of
from tests.support.parity import BASE, randomize
from tests.support.rl_batches import sequences
from tests.support.sharded import SMALL

pytestmark = pytest.mark.gpu

# float32 with products in TF32, whose 11 bits round to 5e-4, over about ten layers of operations.
CLOSE = 2e-2


@pytest.fixture
def gen(seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("vocab", [31, 61, 154880])
def test_masks_are_recorded_as_on_the_cpu(vocab, gen):
    is_kept_TW = torch.rand(9, vocab, generator=gen) < torch.linspace(0, 1, 9)[:, None]
    is_kept_TW[:, 5] = True
    bits_TU = bits_of(is_kept_TW)
    assert torch.equal(bits_of(is_kept_TW.cuda()).cpu(), bits_TU)
    kept = kept_of(recorded(bits_TU.numpy()), "cuda")
    assert torch.equal(kept.dropped(vocab).cpu(), ~is_kept_TW)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "dis"])
def test_a_step_is_that_of_the_cpu(preset):
    model = Glm5(ModelConfig.from_dict(BASE | SMALL | {"index_topk": 64}))  # no key is left out by a close score
    model.add_value_head()
    randomize(model, seed=3)
    found = sequences(7, 61, PRESETS[preset], kept=True)
    batches = batches_of(found, pack(found, 40), 0)

    def run(device: str) -> tuple[dict[str, float], dict[str, Tensor]]:
        objective = RLObjective(PRESETS[preset], Coefficients(ref_kl=0.3, entropy=0.2), chunk=7)
        step = policy_step(
            copy.deepcopy(model).to(device), objective, OptimizerConfig(kind="adamw", max_grad_norm=None)
        )
        given = [with_logprobs(step, one.to(device), "reference") for one in batches]
        grads: dict[str, Tensor] = {}
        step.optimizers.step = lambda lr: grads.update(  # type: ignore[method-assign]
            {name: one.grad.cpu() for name, one in step.optimizers.named.items() if one.grad is not None}
        )
        return step.run(given, 0.0), grads

    (got, grads), (want, want_grads) = run("cuda"), run("cpu")
    print(got, want)
    assert got == pytest.approx(want, rel=CLOSE, abs=1e-3)
    assert max(rel_rms(grads[name], want_grads[name]) for name in want_grads) < CLOSE
