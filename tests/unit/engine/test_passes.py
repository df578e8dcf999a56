"""Passes of the inference form: rows as independent as the model's own, and steps without pieces."""

import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.runner import runner as runners
from glm5.engine.runner.forward.passes import Passes
from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.engine.sampling import SamplingParams
from glm5.kernels.invariant import PASS_ROWS
from glm5.model.lowering import use_invariant
from tests.support.arranged_rows import in_turn, make_ids, mixed
from tests.support.models import random_model
from tests.support.running import Bench

MAX_LEN = 256


def test_a_row_is_the_same_in_any_pass(seed, rng):
    model = random_model(seed, preset("tiny"))
    use_invariant(model)
    passes, ids = Passes(model, PASS_ROWS, FusedModel(model, MAX_LEN)), make_ids(model.cfg, rng)
    want = in_turn(passes, ids, rng)
    assert mixed(passes, ids, rng).num_unlike(want) == 0
    assert in_turn(Passes(model, PASS_ROWS), ids, rng).num_unlike(want) > 0  # the control: other sums, other bits


def test_steps_in_passes_have_no_pieces(seed):
    model = random_model(seed, preset("tiny"))
    use_invariant(model)
    runner = Bench(model, depth=2, pass_rows=PASS_ROWS, fused=True).runner
    assert runner.passes.fused is not None
    assert runner.steps is None
    assert runner.prompts is None


@pytest.mark.parametrize("depth", [0, 2])
def test_answers_are_those_of_the_models_own_modules(depth, seed):
    model = random_model(seed, preset("tiny"))
    use_invariant(model)
    params = SamplingParams(temperature=0, max_tokens=6)
    prompts = [torch.randint(2, 60, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 70, 33)]
    plain, fused = (
        Bench(model, depth=depth, pass_rows=PASS_ROWS, fused=fused).run(prompts, params) for fused in (False, True)
    )
    assert fused.tokens == plain.tokens


@pytest.mark.parametrize("shares", [False, True], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("depth", [0, 3])
def test_passes_at_one_place_give_the_same_bits(depth, shares, seed, monkeypatch):
    """As graphs need them: what a pass reads and writes lies where it always does, whatever the batch is."""
    cfg = preset("tiny").replace(index_share_for_mtp_iteration=shares)
    model = random_model(seed, cfg)
    use_invariant(model)
    kinds = [{"temperature": 0}, {"seed": 1, "top_p": 0.9}, {"temperature": 0.7, "seed": 2}]
    params = [SamplingParams(max_tokens=6, logprobs=2, **kind) for kind in kinds]
    prompts = [torch.randint(2, 60, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 70, 133)]
    plain = Bench(model, depth=depth, pass_rows=PASS_ROWS, fused=True, routing=True).run(prompts, params, routed=True)
    monkeypatch.setattr(runners, "can_capture", lambda _: True)
    bench = Bench(model, depth=depth, pass_rows=PASS_ROWS, fused=True, routing=True)
    bench.runner.sample_padding(PASS_ROWS)  # as before the first request
    static = bench.run(prompts, params, routed=True)
    assert bench.runner.pass_graphs is not None
    assert static.tokens == plain.tokens
    assert static.logprobs == plain.logprobs
    experts = [[b"".join(part.experts for part in run.routed[i]) for i in range(3)] for run in (static, plain)]
    assert experts[0] == experts[1]
