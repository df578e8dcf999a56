"""The exact training pass on a GPU, in bfloat16: every sampled token has the bits that the engine reported, and the
step costs at most what a step may cost. And what training without it is apart from the rollouts.

Run it on one GPU: `python -m pytest tests/gpu/test_exact_cuda.py -s`.
"""

import random
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

import glm5
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.kernels.sampled_logprobs import sampled_logprobs
from glm5.model.packed import PackedView
from glm5.rl.training.exact import ExactPass
from glm5.rl.training.expert_replay import replayed_experts
from glm5.rl.training.prefixes import Prefixes
from tests.support.exact import REPORTED, SAMPLED, Drawn, default_logprobs, num_unlike, prompts_of

pytestmark = pytest.mark.gpu

MINI = Path(__file__).parents[2] / "models" / "mini"
NUM_SEQS, NUM_TOKENS = 64, 128  # 8,192 sampled tokens
ICEPOP = 2.0  # a ratio beyond this, or below its inverse, is masked
WARM, TIMED = 3, 10


@pytest.fixture(scope="module")
def model():
    return glm5.load(MINI, device="cuda").requires_grad_()


def rollouts(model, *, deterministic: bool, ways=SAMPLED, seed=0) -> tuple[Drawn, torch.Tensor, str | None]:
    """8,192 sampled tokens, the experts of all computed tokens, and the engine's arithmetic."""
    rng = random.Random(seed)
    prompts = prompts_of(rng, model.cfg.vocab_size, [rng.randint(1, 150) for _ in range(NUM_SEQS)])
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            **REPORTED,
            seed=rng.getrandbits(31),
            **ways[number % len(ways)],
        )
        for number in range(NUM_SEQS)
    ]
    drawn, experts = Drawn(sequences=[list(prompt) for prompt in prompts]), []
    settings = {"enable_return_routed_experts": True, "max_model_len": 320, "max_num_seqs": NUM_SEQS}
    with LLM(model, deterministic=deterministic, **settings) as llm:
        arithmetic = llm.client.info.arithmetic
        for number, output in enumerate(llm.generate(prompts, params, use_tqdm=False, routed_experts=True)):
            answer = output.outputs[0]
            tokens = answer.token_ids, answer.tempered_logprobs, answer.weight_versions
            drawn.add(number, *tokens, params[number])
            experts.append(answer.routed_experts)
    return drawn, torch.from_numpy(np.concatenate(experts)).cuda(), arithmetic


def test_every_sampled_token_has_the_engines_bits(model):
    drawn, expert_TLA, arithmetic = rollouts(model, deterministic=True)
    exact = ExactPass(model, threads=1)
    exact.check(arithmetic)
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
    plain = rollouts(model, deterministic=True, ways=[{"temperature": 1.0}])[0]
    assert num_unlike(default_logprobs(model, plain), plain.reported) > len(logprob_G) / 2
    ones = torch.ones_like(drawn.temperatures)
    # (A token that is all but certain keeps its bits at any temperature.)
    assert num_unlike(drawn.scored(exact, ones), drawn.reported) > len(logprob_G) / 4


def test_the_cost_of_an_exact_step(model):
    drawn = rollouts(model, deterministic=False, ways=[{"temperature": 1.0}])[0]
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
@torch.no_grad()
def test_what_other_training_passes_are_apart(model, deterministic):
    """Printed: differences to the rollout, the estimate k3 of the KL divergence, the share that IcePop masks."""
    drawn, expert_TLA, _ = rollouts(model, deterministic=deterministic, ways=[{"temperature": 1.0}])
    default = default_logprobs(model, drawn)
    with replayed_experts(model, expert_TLA):
        replayed = default_logprobs(model, drawn)
    exact = drawn.scored(ExactPass(model, threads=1))
    print(f"\nengine deterministic: {deterministic}")
    for name, logprob_G in (("definition", default), ("with replay", replayed), ("exact", exact)):
        log_ratio_G = logprob_G - drawn.reported
        ratio_G = log_ratio_G.exp()
        masked = ((ratio_G > ICEPOP) | (ratio_G < 1 / ICEPOP)).float().mean()
        k3 = (ratio_G - 1 - log_ratio_G).mean()
        print(
            f"{name:12} mean {log_ratio_G.abs().mean():.2e}, largest {log_ratio_G.abs().max():.2e}, k3 {k3:.2e}, "
            f"masked {masked:.3%}, differ {(log_ratio_G != 0).float().mean():.1%}"
        )
    if deterministic:
        assert not (exact != drawn.reported).any()
