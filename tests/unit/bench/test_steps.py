"""The benchmark of steps runs, on a CPU and a small model, and counts experts as they should fall."""

import pytest
import torch

from glm5.bench.latency.expert_coverage import expected_experts
from glm5.bench.steps.case import Load, Prompts, StepCase, rank_config, with_codes
from glm5.config.presets import preset
from glm5.model.lowering import weight_kinds


@pytest.mark.parametrize("layout", ["auto", "fp8"])
def test_steps_of_a_small_model(layout):
    cfg, loads = preset("nano"), [Load(2, 100, 1), Load(8, 100)]
    case = StepCase(cfg, loads, fp8=True, layout=layout, device="cpu")
    for load in loads:
        plan, specs = case.enter(load)
        for _ in range(2):
            case.step(plan, specs, load)
        assert (case.runner.slots.len_Y[: load.batch] == load.context).all()
        distinct = case.experts(load)
        assert len(distinct) == 2
        assert max(distinct) <= cfg.n_routed_experts
        assert min(distinct) > expected_experts(cfg, load.batch * (1 + load.depth)) / 2


@pytest.mark.parametrize("start", [0, 64])
def test_prompts_of_a_small_model(start):
    cfg, load = preset("nano"), Prompts(2, 100, start)
    case = StepCase(cfg, [load], fp8=True, device="cpu")
    plan, specs = case.enter(load)
    assert plan.num_tokens == load.num_tokens == 2 * (100 - start)
    case.step(plan, specs, load)
    assert (case.runner.slots.token_YS[:2, 100] < cfg.vocab_size).all()


@pytest.mark.parametrize("recipe", ["w4a8-channel", "w4a8-group"])
def test_a_step_over_weights_as_codes(recipe):
    load = Load(2, 40)
    case = StepCase(with_codes(preset("nano"), recipe), [load], fp8=True, device="cpu")
    assert any(name.startswith("w4a8") for name in weight_kinds(case.runner.model))
    case.step(*case.enter(load), load)


def test_one_ranks_shape():
    cfg = rank_config(8, 6)
    assert (cfg.num_attention_heads, cfg.moe_intermediate_size, cfg.vocab_size) == (8, 256, 19360)
    assert cfg.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 3
    assert expected_experts(cfg, 1) == pytest.approx(8)
    assert torch.tensor(expected_experts(cfg, 128)) > 250
