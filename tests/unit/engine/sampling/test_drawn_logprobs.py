"""Tempered log-probabilities are those of the distribution that tokens are drawn from, against float64, and sampling
masks its tokens; a prompt's log-probabilities are at the request's temperature."""

import asyncio
import math

import numpy as np
import pytest
import torch

from glm5.common.errors import RequestError
from glm5.engine import AsyncEngine
from glm5.engine.sampling import Placement, Rows, Sampler, SamplingParams
from glm5.engine.sampling.params import answer_seeds, check_prompt_masks
from glm5.kernels.sampled_logprobs import kept_ids, recorded

VOCAB, PROMPT, OUTPUT, BAD = 60, [5, 40, 40], [31, 9, 9], [[9, 2], [7]]
BUDGET = 1e-5  # float32 against float64, sums of 60 terms; seen 1e-6
PARAMS = {
    "temperature": {"temperature": 0.9},
    "greedy": {"temperature": 0.0},
    "top_k": {"temperature": 0.7, "top_k": 5},
    "top_p": {"temperature": 1.3, "top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "all cuts": {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "top_k": 3, "top_p": 0.5},
    "biases": {"temperature": 0.5, "logit_bias": {3: 4.0, 31: -8.0}},
    "allowed": {"temperature": 1.5, "allowed_token_ids": [1, 2, 3, 9, 40]},
    "everything": {
        "temperature": 0.6,
        "top_k": 8,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 2.0},
        "allowed_token_ids": list(range(30)),
    },
    "plain": {},
}


def distribution(logits_W, params: SamplingParams) -> torch.Tensor:
    """log p of what is drawn from, in float64, one token after the other."""
    logits = logits_W.double().clone()
    if params.allowed_token_ids is not None:
        for token in set(range(VOCAB)) - set(params.allowed_token_ids):
            logits[token] = -math.inf
    for word in BAD:
        if OUTPUT[len(OUTPUT) - len(word) + 1 :] == word[:-1]:
            logits[word[-1]] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*PROMPT, *OUTPUT}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(OUTPUT):
        logits[token] -= params.frequency_penalty * OUTPUT.count(token) + params.presence_penalty
    if params.greedy:
        return logits.log_softmax(-1)
    logits /= params.temperature
    p = logits.softmax(-1)
    kept = p >= params.min_p * p.max()
    order = sorted(range(VOCAB), key=lambda token: (-logits[token].item(), token))
    order = [token for token in order if kept[token]][: params.top_k or VOCAB]
    mass, whole, head = 0.0, sum(p[token].item() for token in order), []
    for token in order:
        if params.top_p < 1 and mass >= params.top_p * whole:
            break
        head.append(token)
        mass += p[token].item()
    left = torch.full_like(logits, -math.inf)
    left[head] = logits[head]
    return left.log_softmax(-1)


def has_mask(params) -> bool:
    return params.truncates


def mask(got, row) -> list[int]:
    return kept_ids(recorded(got.mask_TU.numpy())[row]).tolist()


def sampled(names, logits_TW):
    """One row for each set of parameters, all in one batch."""
    params = [SamplingParams(**PARAMS[name], logprobs=20) for name in names]
    sampler = Sampler(len(params), VOCAB)
    sampler.place(
        [
            Placement(i, one, 7, PROMPT, OUTPUT, bad_words=BAD, sampling_mask=has_mask(one))
            for i, one in enumerate(params)
        ]
    )
    slots = torch.arange(len(params))
    rows = Rows(slots.numpy(), slots, torch.full_like(slots, 6), torch.zeros_like(slots))
    return params, sampler.sample(logits_TW, rows)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference; what one of them has not, neither has."""
    assert torch.equal(found.isinf(), wanted.isinf())
    seen = wanted.isfinite()
    return (found.double() - wanted)[seen].abs().max().item()


def make(num_rows, seed):
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("names", [*([name] for name in PARAMS), list(PARAMS)], ids=lambda names: "+".join(names)[:20])
def test_tempered_is_of_the_distribution_that_is_drawn_from(names, seed):
    logits = make(len(names), seed)
    params, got = sampled(names, logits)
    for row, one in enumerate(params):
        want, own = distribution(logits[row], one), logits[row].double().log_softmax(-1)
        token, likeliest = got.token_T[row], got.logprobs.top_token_TU[row]
        assert error(got.logprobs.tempered_T[row, None], want[token][None]) < BUDGET
        assert error(got.logprobs.top_tempered_TU[row], want[likeliest]) < BUDGET
        assert error(got.logprobs.logprob_T[row, None], own[token][None]) < BUDGET  # the model's own stay that
        if has_mask(one):
            assert mask(got, row) == want.isfinite().nonzero()[:, 0].tolist()


@pytest.mark.parametrize("name", sorted(PARAMS.keys() - {"plain", "temperature", "greedy"}))
def test_the_budget_notices_what_is_left_out(name, seed):
    """The control: logits at the temperature alone."""
    logits = make(1, seed)
    (params,), got = sampled([name], logits)
    plain = (logits[0].double() / (params.temperature or 1.0)).log_softmax(-1)
    found = got.logprobs.top_tempered_TU[0].double()
    shown = found.isfinite()
    assert not shown.all() or (found - plain[got.logprobs.top_token_TU[0]]).abs().max() > 100 * BUDGET


@pytest.mark.parametrize("cached", [VOCAB, 1 << 18])
def test_a_row_has_the_same_bits_beside_others(cached, seed, monkeypatch):
    monkeypatch.setattr("glm5.engine.sampling.sampler._CACHED", cached)  # one row at a time, or all
    logits = make(len(PARAMS), seed)
    _, together = sampled(list(PARAMS), logits)
    for row, name in enumerate(PARAMS):
        _, alone = sampled([name], logits[row : row + 1])
        assert torch.equal(alone.logprobs.tempered_T[0], together.logprobs.tempered_T[row]), name
        assert torch.equal(alone.logprobs.top_tempered_TU[0], together.logprobs.top_tempered_TU[row])
        if has_mask(SamplingParams(**PARAMS[name])):
            assert mask(alone, 0) == mask(together, row)


@pytest.mark.parametrize("temperature", [0.0, 0.9, 1.0, 2.0])
def test_a_prompt_s_tokens_are_at_the_temperature(temperature, seed):
    logits, tokens = make(3, seed), torch.tensor([4, 0, 59])
    found = Sampler(1, VOCAB).logprobs(logits, tokens, 5, temperature)
    own, want = (logits.double().div(t).log_softmax(-1) for t in (1.0, temperature or 1.0))
    rows = torch.arange(3)
    assert error(found.logprob_T, own[rows, tokens]) < BUDGET
    assert error(found.tempered_T, want[rows, tokens]) < BUDGET
    assert error(found.top_tempered_TU, want.gather(1, found.top_token_TU)) < BUDGET
    if temperature == 0.9:
        assert (found.logprob_T - found.tempered_T).abs().max() > 100 * BUDGET  # the control


def test_no_answer_shares_its_seed_with_a_neighbouring_request():
    """Seeds that count up would be those of the request with the next seed."""
    first = [0, 1, 2, 41, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
    seeds = [answer for seed in first for answer in answer_seeds(seed, 128)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert [answer_seeds(seed, 3)[0] for seed in first] == first  # a request of one answer is what it was
    assert answer_seeds(-1, 4) == answer_seeds(2**64 - 1, 4)
    assert answer_seeds(7, 2) == answer_seeds(7, 5)[:2]


def test_an_answer_read_as_a_prompt_has_the_log_probabilities_it_was_drawn_with(make_llm, tiny):
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=2)
    llm, prompt = make_llm(), [5, 9, 200, 31]
    answer = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    again = llm.generate(prompt + answer.token_ids, params.but(max_tokens=1), use_tqdm=False)[0]
    reported = [
        entry[token] for entry, token in zip(again.prompt_logprobs[1:], again.prompt_token_ids[1:], strict=True)
    ]
    tempered = torch.tensor([one.tempered for one in reported])
    torch.testing.assert_close(tempered[3:], torch.tensor(answer.tempered_logprobs), rtol=0, atol=BUDGET)
    logits_TW, tokens = tiny.logits(again.prompt_token_ids[:-1]).double(), torch.tensor(again.prompt_token_ids[1:])
    own, want = ((logits_TW / t).log_softmax(-1).gather(1, tokens[:, None])[:, 0] for t in (1.0, 0.9))
    assert error(tempered, want) < BUDGET
    assert error(torch.tensor([one.logprob for one in reported]), own) < BUDGET
    assert (tempered - own).abs().max() > 100 * BUDGET  # the control


def test_an_answer_read_with_its_vocabularies_has_the_log_probabilities_it_was_drawn_with(make_llm):
    """In two lengths of masks, and chunks of 16 tokens."""
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=0, output_kind="DELTA")
    prompt = [5, 9, 200, 31]

    async def read(engine: AsyncEngine, cuts: dict) -> tuple[list, list, list]:
        async with engine.generate(prompt, params.but(**cuts), sampling_mask=True) as deltas:
            found = [delta async for delta in deltas]
        ids, drawn, masks = (
            [one for delta in found for one in getattr(delta, name)]
            for name in ("token_ids", "tempered_logprobs", "sampling_mask")
        )
        asked, scores = params.but(max_tokens=1, prompt_logprobs=0), []
        for given in ({"prompt_masks": (*[b""] * (len(prompt) - 1), *masks)}, {}):
            async with engine.generate(prompt + ids, asked, **given) as deltas:
                entries = [entry async for delta in deltas for entry in delta.prompt_logprobs or ()][len(prompt) - 1 :]
            scores.append([entry[token].tempered for entry, token in zip(entries, ids, strict=True)])
        return drawn, *scores

    with AsyncEngine(make_llm()) as engine:
        for cuts in ({"top_k": 4}, {"min_p": 0.2}, {"top_p": 0.9}):
            drawn, scored, uncut = map(torch.tensor, asyncio.run(read(engine, cuts)))
            torch.testing.assert_close(scored, drawn, rtol=0, atol=BUDGET)
            assert (uncut - drawn).abs().max() > 100 * BUDGET  # the control


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        ([b""], "prompt_masks are 1; allowed: 2, as many as"),
        ([b"", b"abc"], "prompt_masks is b'abc'; allowed: what sampling_mask reports of a vocabulary of 60"),
        ([b"", np.array([60], "<i4").tobytes()], "allowed: what sampling_mask"),
        ([b"", np.array([-2, 1], "<i4").tobytes()], "allowed: what sampling_mask"),
        ([b"", np.array([-1, 1], "<i4").tobytes()], "allowed: what sampling_mask"),
    ],
)
def test_vocabularies_of_a_prompt_that_are_none_are_refused(masks, said):
    with pytest.raises(RequestError, match=said):
        check_prompt_masks(masks, 3, VOCAB)
    check_prompt_masks([b"", np.array([-1, 1, 2], "<i4").tobytes()], 3, VOCAB)
    check_prompt_masks([np.array([0, 59], "<i4").tobytes(), b""], 3, VOCAB)


def test_answers_of_neighbouring_seeds_differ(make_llm):
    params = SamplingParams(n=4, max_tokens=6, ignore_eos=True)
    requested = [params.but(seed=seed) for seed in (5, 6)]
    outs = make_llm().generate([[1, 2, 3]] * 2, requested, use_tqdm=False)
    answers = [tuple(answer.token_ids) for out in outs for answer in out.outputs]
    assert len(set(answers)) == 8
