"""Held-out metrics against sums over the whole text."""

import math

import pytest
import torch

from glm5.config.presets import preset
from glm5.model.glm5 import Glm5
from glm5.model.init import init_weights
from glm5.train.batch import Batch
from glm5.train.evaluate import byte_lengths, held_out
from glm5.train.step import Phase
from tests.support.tokenizers import tiny_tokenizer

TEXT = "the weather in Paris is fine 北京, é\n"


@pytest.fixture(scope="module")
def model():
    made = Glm5(preset("tiny"))
    init_weights(made, 3)
    return made.eval()


def test_bits_per_byte_are_those_of_the_text(model):
    """Whatever its tokens; named ones, such as that of its end, count neither as bits nor as bytes."""
    tokenizer = tiny_tokenizer()
    bytes_W = byte_lengths(tokenizer, model.cfg.vocab_size)
    end = tokenizer.id_of("<|endoftext|>")
    ids = [*tokenizer.encode(TEXT, allow_special=False), end]
    assert len(ids) < len(TEXT.encode()), "some tokens have several bytes"
    assert bytes_W[end] == 0
    batch = Batch(torch.tensor(ids), torch.ones(len(ids)), [len(ids)])
    found = held_out(model, [batch], Phase("sparse"), bytes_W)
    with torch.no_grad():
        logprob_TW = model.logits(ids).double().log_softmax(-1)
    nats = [-logprob_TW[i, token_id].item() for i, token_id in enumerate(ids[1:])]
    num_bytes = len(TEXT.encode()) - len(tokenizer.bytes_of(ids[0]))  # the first token is not predicted
    assert found["bits per byte"] == pytest.approx(sum(nats[:-1]) / math.log(2) / num_bytes, rel=1e-5)
    assert found["held-out loss"] == pytest.approx(sum(nats) / len(nats), rel=1e-5)

    again = held_out(model, [batch, batch], Phase("sparse"), bytes_W)
    assert again["bits per byte"] == pytest.approx(found["bits per byte"])
    assert "bits per byte" not in held_out(model, [batch], Phase())


def test_only_what_is_learnt_counts(model):
    ids = tiny_tokenizer().encode(TEXT)
    weights = torch.zeros(len(ids))
    weights[5] = 1.0
    batch = Batch(torch.tensor(ids), weights, [len(ids)])
    found = held_out(model, [batch], Phase(), byte_lengths(tiny_tokenizer(), model.cfg.vocab_size))
    num_bytes = len(tiny_tokenizer().bytes_of(ids[5]))
    assert found["bits per byte"] == pytest.approx(found["held-out loss"] / math.log(2) / num_bytes)
