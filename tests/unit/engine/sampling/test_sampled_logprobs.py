"""Log-probabilities are the softmax's of the model's own logits, whatever the sampler does to them. (Tempered ones:
test_drawn_logprobs.py.)"""

import numpy as np
import pytest
import torch

from glm5.engine.sampling import Placement, Sampler, SamplingParams
from glm5.engine.sampling.logprobs import logprobs
from tests.unit.engine.sampling.oracle import rows_of

TOLERANCE = 1e-6  # float32; seen 5e-7


def test_logprobs_and_ranks():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    want = logits.double().log_softmax(-1)
    found = logprobs(logits, torch.tensor([2, 3]), None, 3)
    assert found.rank_T.tolist() == [2, 1]
    assert found.top_token_TU.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert found.logprob_T.tolist() == pytest.approx([want[0, 2].item(), want[1, 3].item()])
    assert found.top_logprob_TU[0].tolist() == pytest.approx(want[0, [1, 2, 3]].tolist())
    assert torch.equal(found.tempered_T, found.logprob_T)


@pytest.mark.parametrize("vocab_size", [50, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_agree_with_float64(dtype, vocab_size, seed):
    temperatures = [0.0, 1.0, 0.6, 2.0]
    logits = (torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)
    params = [
        SamplingParams(temperature=t, logprobs=n, presence_penalty=1.0, top_k=5, logit_bias={3: 5.0})
        for t, n in zip(temperatures, (0, 4, 2, 7), strict=True)
    ]
    sampler = Sampler(4, vocab_size)
    sampler.place([Placement(slot, one, slot, [1], [2]) for slot, one in enumerate(params)])
    sampled = sampler.sample(logits, rows_of(range(4), [2] * 4))
    found = sampled.logprobs
    assert found is not None
    rows = torch.arange(4)
    want = logits.double().log_softmax(-1)[rows, sampled.token_T]
    np.testing.assert_allclose(found.logprob_T.double(), want, rtol=0, atol=TOLERANCE * 10)
    assert found.top_token_TU.shape == (4, 7)
    want = logits.double().log_softmax(-1)
    order = sorted(range(vocab_size), key=lambda w: (-want[3, w].item(), w))
    assert found.top_token_TU[3].tolist() == order[:7]
    np.testing.assert_allclose(found.top_logprob_TU.double(), want.gather(1, found.top_token_TU), atol=1e-5)


def test_nobody_asked():
    sampler = Sampler(1, 9)
    sampler.place([Placement(0, SamplingParams(), 0, [1])])
    assert sampler.sample(torch.zeros(1, 9), rows_of([0], [1])).logprobs is None


def test_more_were_asked_for_than_there_are():
    found = logprobs(torch.zeros(1, 3), torch.tensor([1]), None, 3)
    assert found.top_token_TU.tolist() == [[0, 1, 2]]
