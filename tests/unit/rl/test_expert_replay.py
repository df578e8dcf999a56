"""Routing replay: the trainer's routers take the experts that the engine chose, each record once."""

import pytest
import torch

from glm5.common.errors import TrainingError
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.model.moe import MoE, Router
from glm5.model.packed import PackedView
from glm5.rl.training.expert_replay import replayed_experts, routers_of
from glm5.train.activation_memory import set_activation_memory
from tests.support.models import random_model

LENGTH = 30


@pytest.fixture
def model(seed):
    return random_model(seed).requires_grad_()


@pytest.fixture
def ids(rng, model):
    return torch.tensor([rng.randrange(model.cfg.vocab_size) for _ in range(LENGTH)])


def chosen(model, ids) -> torch.Tensor:
    """The experts that a pass takes, [T, MoE layers, A]."""
    seen: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda *given: seen.append(given[2][1])) for router in routers_of(model)]
    with torch.no_grad():
        model(ids, PackedView([len(ids)]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


def gradients(model, ids) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.head(model(ids, PackedView([len(ids)]))).square().mean().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def test_the_recorded_experts_are_taken_and_the_unknown_ones_chosen(model, ids):
    own = chosen(model, ids)
    other = (own + 1) % model.cfg.n_routed_experts
    other = other.sort(dim=-1).values
    other[5:9] = -1
    with replayed_experts(model, other.short()):
        taken = chosen(model, ids)
    known = torch.ones(LENGTH, dtype=torch.bool)
    known[5:9] = False
    assert torch.equal(taken[known], other[known])
    assert (taken[~known] >= 0).all()
    with replayed_experts(model, own.short()):
        assert torch.equal(chosen(model, ids), own)
    assert torch.equal(chosen(model, ids), own)  # nothing is left behind


@pytest.mark.parametrize("recompute", [None, "mlp", "layer"])
def test_a_replay_of_the_own_choice_changes_no_gradient(model, ids, recompute):
    """Whether activations are kept or computed again."""
    own = chosen(model, ids).short()
    want = gradients(model, ids)
    set_activation_memory(model, recompute, offload=False)
    with replayed_experts(model, own):
        got = gradients(model, ids)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-7)


def test_scores_of_recorded_experts_have_a_gradient(seed):
    """Against float64's own differences: experts that the router would not have chosen."""
    router = Router(random_model(seed).cfg).double()
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=gen))
    x_TD = torch.randn(4, router.weight.shape[1], generator=gen, dtype=torch.float64, requires_grad=True)
    expert_TA = torch.tensor([[0, 1], [2, 3], [1, 7], [0, 6]])

    def weights(x: torch.Tensor) -> torch.Tensor:
        from glm5.kernels.router import replay

        return replay(x, router.weight, router.e_score_correction_bias, expert_TA, **router._choice)[0]

    assert torch.autograd.gradcheck(weights, (x_TD,))


def test_faults_are_named(model, ids):
    own = chosen(model, ids).short()
    other = r"recorded experts of shape \[30, 1, 2\]; this model's are \[tokens, 3, 2\]"
    with pytest.raises(TrainingError, match=other), replayed_experts(model, own[:, :1]):
        pass
    shorter = "recorded experts of 29 tokens for a pass of 30"
    with pytest.raises(TrainingError, match=shorter), replayed_experts(model, own[1:]):
        chosen(model, ids)
    with pytest.raises(TrainingError, match="a second time"), replayed_experts(model, own):
        chosen(model, ids)
        chosen(model, ids)
    unused = r"no pass took the recorded experts of MoE layers \[0, 1, 2\]"
    with pytest.raises(TrainingError, match=unused), replayed_experts(model, own):
        pass
    assert all(layer.mlp.gate.recorded is None for layer in model.model.layers if isinstance(layer.mlp, MoE))


@pytest.mark.compiler
def test_what_a_native_engine_reports_is_what_the_trainer_replays(model, rng):
    """Chunks included."""
    prompt = [rng.randrange(model.cfg.vocab_size) for _ in range(70)]
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=3)
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 2, "enable_return_routed_experts": True}
    with LLM(model, max_model_len=128, **settings) as llm:
        assert dict(llm.table)["threads"].endswith("native code")
        first, again = (llm.generate(prompt, params, use_tqdm=False, routed_experts=True)[0] for _ in range(2))
    own = chosen(model, torch.tensor(prompt + first.outputs[0].token_ids[:-1])).numpy()
    for output in (first, again):
        assert (output.outputs[0].routed_experts == own).all()
