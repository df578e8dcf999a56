"""Log-probabilities of /generate at the request's temperature, of prompt and answer alike."""

import httpx
import pytest
import torch

from glm5.config.presets import preset
from tests.support.models import random_model
from tests.support.tokenizers import tiny_tokenizer

IDS = tiny_tokenizer().encode("the answer is: Berlin")
BUDGET = 1e-4  # float32, in the server's batches


def generate(server, **body):
    return httpx.post(f"{server[0]}/generate", json=body | {"return_logprob": True}, timeout=60).json()["meta_info"]


@pytest.mark.parametrize("temperature", [0.0, 0.9, 2.0])
def test_a_prompt_is_scored_at_the_temperature(model_server, temperature):
    params = {"temperature": temperature, "max_new_tokens": 0}
    meta = generate(model_server, input_ids=IDS, logprob_start_len=0, top_logprobs_num=2, sampling_params=params)
    logits_TW = random_model(11, preset("tiny")).logits(IDS[:-1]).double()
    own, want = ((logits_TW / t).log_softmax(-1) for t in (1.0, temperature or 1.0))
    tokens = torch.tensor(IDS[1:])[:, None]
    reported = torch.tensor([value for value, _, _ in meta["input_token_logprobs"][1:]])
    assert (reported - want.gather(1, tokens)[:, 0]).abs().max() < BUDGET
    for row, best in zip(want, meta["input_top_logprobs"][1:], strict=True):
        assert [value for value, _, _ in best] == pytest.approx(row.topk(2).values.tolist(), abs=BUDGET)
    if temperature > 0:
        assert (reported - own.gather(1, tokens)[:, 0]).abs().max() > 100 * BUDGET  # the control


def test_what_could_not_be_drawn_has_no_figure(model_server):
    params = {"temperature": 0.8, "top_k": 2, "max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 3}
    meta = generate(model_server, input_ids=IDS, top_logprobs_num=4, sampling_params=params)
    for (value, token, _), row in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        logprobs = {token: value for value, token, _ in row}
        assert logprobs[token] == value
        possible = torch.tensor([value for value in logprobs.values() if value is not None])
        assert len(possible) == 2
        assert possible.exp().sum().item() == pytest.approx(1.0, abs=BUDGET)
