"""Prompts in pieces of static shape, which are graphs on a GPU: the answers and the drafts of steps as they are."""

import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.sampling import SamplingParams
from tests.support.models import random_model
from tests.support.running import Bench


@pytest.fixture(scope="module", params=[False, True], ids=["own keys", "shared keys"])
def model(request):
    """Drafts of drafts select keys of their own, or read those of the first."""
    return random_model(5, preset("tiny").replace(index_share_for_mtp_iteration=request.param), torch.float64)


def test_drafts_stand_as_often_as_those_of_whole_steps(model, rng):
    """Prompts shorter and longer than what is selected, cut into chunks, alone and beside sequences that decode."""
    prompts = [[rng.randrange(320) for _ in range(length)] for length in (3, 150, 8, 70, 40)]
    params = SamplingParams(temperature=0, max_tokens=10, prompt_logprobs=1)
    plain, fused = (Bench(model, depth=3, fused=fused).run(prompts, params) for fused in (False, True))
    assert fused.tokens == plain.tokens
    assert fused.num_accepted == plain.num_accepted
    for i, prompt in enumerate(prompts):
        assert len(fused.prompt_logprobs[i]) == len(prompt) - 1
        for got, want in zip(fused.prompt_logprobs[i], plain.prompt_logprobs[i], strict=True):
            assert (got.token_id, got.rank) == (want.token_id, want.rank)


def test_shapes_are_few_and_hold_every_step():
    bench = Bench(random_model(5), depth=1, max_num_seqs=8, max_model_len=4096, fused=True)
    prompts = bench.runner.prompts
    assert [prompts._groups(rows) for rows in (4, 32, 64, 128)] == [[9], [4, 9], [8, 9], [9]]
    shapes = prompts.shapes([4, 32])
    assert len(shapes) == len(set(shapes))
    assert {shape.is_full for shape in shapes if shape.context_bucket > prompts.context_buckets[0]} == {False}
    first = prompts._rows_of(32, 9)
    assert prompts._rows_of(4, 9).hidden_TD.data_ptr() == first.hidden_TD.data_ptr()
    assert prompts._rows_of(64, 9).hidden_TD.data_ptr() != first.hidden_TD.data_ptr()
    assert prompts._rows_of(32, 9) is first
