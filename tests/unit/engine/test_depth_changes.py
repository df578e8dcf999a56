"""How deep drafts go changes from step to step, and answers never do.

A step may check drafts of longer ago: none were made since the depth was lowered. With a vocabulary this small they are
right now and then, and then the rows behind them must have read those very tokens.
"""

import pytest

from glm5.config.presets import preset
from glm5.engine.sampling.params import SamplingParams
from tests.support.models import random_model
from tests.support.real_core import RealCore, Request

VOCAB, MAX_DEPTH = 12, 3
CFG = preset("tiny").replace(vocab_size=VOCAB, eos_token_id=0, pad_token_id=0)


class Fickle:
    """In the place of `AdaptiveDepth`: any depth, for a few steps each."""

    def __init__(self, rng):
        self.rng, self.depth = rng, 0

    def choose(self, _num_seqs: int) -> int:
        if self.rng.random() < 0.4:
            self.depth = self.rng.choice([0, 0, 1, MAX_DEPTH])
        return self.depth

    def observe(self, _num_drafted, _num_accepted) -> None:
        pass


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": False}, {"max_num_seqs": 3}], ids=str)
def test_answers_do_not_change(settings, seed, rng):
    model = random_model(seed, CFG)
    requests = [
        Request(
            [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 90))],
            SamplingParams(temperature=rng.choice([0.0, 0.8]), max_tokens=None),
            rng.getrandbits(60),
            rng.randint(20, 60),
        )
        for _ in range(24)
    ]
    alone = []
    with RealCore(model, deterministic=True, max_num_seqs=1) as engine:
        for one in requests:
            alone += engine.answer([one])
    with RealCore(model, deterministic=True, num_speculative_tokens=MAX_DEPTH, **settings) as engine:
        engine.core.depth = Fickle(rng)
        got = engine.answer(requests)
        accepted = engine.core.stats()["speculation"]["accepted"]
    assert [one.token_ids for one in got] == [one.token_ids for one in alone]
    assert min(accepted) > 0
