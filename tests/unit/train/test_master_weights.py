"""A model that computes in bfloat16 and learns in float32: masters, their gradients, and a run that goes on."""

import pytest
import torch

from glm5.config.model import ModelConfig
from glm5.config.step import LossConfig, OptimizerConfig
from glm5.model import Glm5
from glm5.train.batch import Batch
from glm5.train.master_weights import MasterWeights
from glm5.train.metrics import MetricsLog
from glm5.train.optim.build import Optimizers
from glm5.train.step import Phase, Step
from tests.support.parity import BASE, randomize
from tests.support.training import run, stage, weights

BFLOAT16 = ["model.compute=bfloat16"]


def made(seed: int) -> tuple[Glm5, MasterWeights, Step]:
    model = Glm5(ModelConfig.from_dict(BASE | {"num_nextn_predict_layers": 0}))
    randomize(model, seed=seed)
    masters = MasterWeights(model, torch.bfloat16)
    optimizers = Optimizers(masters.trained(), model.cfg, OptimizerConfig())
    return model, masters, Step(model, optimizers, LossConfig(mtp_depth=0), Phase("dense"), masters)


def batches(*lengths: int) -> list[Batch]:
    gen = torch.Generator().manual_seed(1)
    return [Batch(torch.randint(2, BASE["vocab_size"], (n,), generator=gen), torch.ones(n), [n]) for n in lengths]


def test_small_updates_are_kept_though_the_model_rounds():
    model, masters, step = made(3)
    before = {name: master.detach().clone() for name, master in masters.named.items()}
    for _ in range(2):
        step.run(batches(9, 14), 1e-4)
    moved = 0
    for name, weight in model.named_parameters():
        master = masters.named[name]
        assert weight.dtype == torch.bfloat16
        assert weight.grad is None
        assert torch.equal(weight, master.bfloat16())
        moved += int(not torch.equal(master, before[name]))
    assert moved > 20
    # Without masters a step of 1e-4 is lost: the control that says why they are there.
    name = "model.layers.0.self_attn.o_proj.weight"
    lost = before[name].bfloat16() == masters.named[name].bfloat16()
    assert lost.float().mean() > 0.5
    assert not torch.equal(before[name], masters.named[name])


def test_gradients_of_batches_are_added_in_float32():
    _, masters, step = made(4)
    grads = []
    for cut in (batches(12), batches(12) + batches(12)):
        step.optimizers.zero_grad()
        for batch in cut:
            step._backward(batch, step._totals(cut))
        grads.append({name: master.grad.clone() for name, master in masters.named.items() if master.grad is not None})
    assert all(grad.dtype == torch.float32 for grad in grads[1].values())
    # Twice the same batch at half the weight: halves are exact in bfloat16, and so is their sum in float32.
    name = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(grads[0][name], grads[1][name])


def test_a_run_goes_on_from_its_masters(tmp_path):
    straight = run(tmp_path, "straight", stage(steps=4), settings=[*BFLOAT16, "checkpoints.every=2"])
    first = [stage(steps=4)]
    with pytest.MonkeyPatch.context() as patch:

        def stop(self, step, metrics):
            if step == 3:
                raise RuntimeError("cut off")

        patch.setattr(MetricsLog, "step", stop)
        with pytest.raises(RuntimeError, match="cut off"):
            run(tmp_path, "out", *first, settings=[*BFLOAT16, "checkpoints.every=2"])
    assert weights(run(tmp_path, "out", *first, settings=[*BFLOAT16, "checkpoints.every=2"])) == weights(straight)
