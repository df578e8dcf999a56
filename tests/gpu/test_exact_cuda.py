"""The exact training pass on a GPU, in bfloat16: every sampled token has the bits that the engine reported, and the
step costs at most what a step may cost. And what training without it is apart from the rollouts.

Run it on one GPU: `python -m pytest tests/gpu/test_exact_cuda.py -s`.
"""

import statistics

import pytest
import torch

import glm5
from glm5.kernels.sampled_logprobs import sampled_logprobs
from glm5.model.packed import PackedView
from glm5.rl.training.exact import ExactPass
from glm5.rl.training.prefixes import Prefixes
from tests.support.exact import default_logprobs, num_unlike
from tests.support.mismatch import MINI, NUM_SEQS, NUM_TOKENS, TEMPERATURE, controls, passes, sample

pytestmark = pytest.mark.gpu

WARM, TIMED = 3, 10


@pytest.fixture(scope="module")
def model():
    return glm5.load(MINI, device="cuda").requires_grad_()


def test_every_sampled_token_has_the_engines_bits(model):
    sampled = sample(model, model.cfg.vocab_size, deterministic=True)
    drawn, expert_TLA, exact = sampled.drawn, sampled.expert_TLA, ExactPass(model, threads=1)
    exact.check(sampled.arithmetic)
    logprob_G = drawn.scored(exact)
    prefixes = Prefixes.of(drawn.ids.numpy(), drawn.lengths)
    trace = exact.engine.run(drawn.ids.cuda(), drawn.lengths, prefixes)
    unlike = num_unlike(logprob_G, drawn.reported)
    print(f"\nexact: {unlike} of {len(logprob_G)} log-probabilities differ")
    assert len(logprob_G) == NUM_SEQS * NUM_TOKENS
    assert unlike == 0
    found_TLA = trace.expert_ULA[torch.from_numpy(prefixes.number_T).cuda()]
    known = (expert_TLA >= 0).all(dim=-1)
    assert torch.equal(found_TLA[known], expert_TLA[known])
    # The controls: the definition's own pass; no temperature.
    plain = sample(model, model.cfg.vocab_size, ways=[{"temperature": 1.0}], deterministic=True).drawn
    assert num_unlike(default_logprobs(model, plain), plain.reported) > len(logprob_G) / 2
    ones = torch.ones_like(drawn.temperatures)
    # (A token that is all but certain keeps its bits at any temperature.)
    assert num_unlike(drawn.scored(exact, ones), drawn.reported) > len(logprob_G) / 4


def test_the_cost_of_an_exact_step(model):
    drawn = sample(model, model.cfg.vocab_size, ways=[{"temperature": 1.0}], deterministic=False).drawn
    ids_T, lengths = drawn.ids.cuda(), drawn.lengths
    row_G, target_G, temperature_G = drawn.rows.cuda(), drawn.targets.cuda(), drawn.temperatures.cuda()
    view, exact = PackedView(lengths, "cuda"), ExactPass(model, threads=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)

    def step(is_exact: bool) -> None:
        model.impl = exact if is_exact else None
        score = exact.logprobs if is_exact else sampled_logprobs
        hidden_TD = model(ids_T, PackedView(lengths, "cuda"))
        logprob_G, entropy_G = score(hidden_TD[row_G], model.lm_head.weight, target_G, temperature_G)
        (-logprob_G.mean() - 1e-3 * entropy_G.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def forward(is_exact: bool) -> None:
        if is_exact:
            exact.engine.run(ids_T, lengths, Prefixes.of(drawn.ids.numpy(), lengths))
        else:
            model.impl = None
            model(ids_T, view)

    for what, run in (("forward pass", forward), ("training step", step)):
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(WARM + TIMED):
            for is_exact in (False, True):  # in turn: neither has the quieter machine
                seconds = timed(lambda run=run, is_exact=is_exact: run(is_exact))
                if number >= WARM:
                    times[is_exact].append(seconds)
        default, own = statistics.median(times[False]), statistics.median(times[True])
        print(f"\n{what} of {len(ids_T)} tokens: default {default:.2f} ms, exact {own:.2f} ms, {own / default:.2f}")
    model.impl = None


def timed(run) -> float:
    """Milliseconds until the GPU has finished."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_other_training_passes_are_apart(model, deterministic):
    """Less than what mistakes are."""
    ways = [{"temperature": TEMPERATURE}]
    sampled = sample(model, model.cfg.vocab_size, ways=ways, deterministic=deterministic)
    found, mistakes = passes(model, sampled), controls(model, sampled)
    for name, one in (found | mistakes).items():
        print(f"\n{deterministic=}: {name:16}{one}", end="")
    assert min(one.k3 for one in mistakes.values()) > max(one.k3 for one in found.values())
    assert min(one.mean for one in mistakes.values()) > max(one.mean for one in found.values())
    if deterministic:
        assert found["exact"].differ == 0
