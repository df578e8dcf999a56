"""Ranks that each have the logits of their own token ids draw, rank and report as one that has them all.

Ranks are threads here, which exchange through a barrier.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from glm5.engine.sampling import Placement, Rows, Sampler, SamplingParams, parts
from glm5.engine.sampling.params import StructuredOutputsParams
from glm5.engine.sampling.parts import VocabShard
from glm5.kernels.sampled_logprobs import Kept
from tests.support.masks import recorded_mask

VOCAB = 96
SECONDS = 30


class Meeting:
    """An exchange of `size` threads."""

    def __init__(self, size):
        self.said, self.barrier = [None] * size, threading.Barrier(size, timeout=SECONDS)

    def at(self, rank):
        meeting = self

        class Exchange:
            def all_gather(self, part):
                meeting.said[rank] = part
                meeting.barrier.wait()
                out = torch.stack(list(meeting.said))
                meeting.barrier.wait()
                return out

        return Exchange()


def together(size, job):
    """`job(part)` of every rank, at once."""
    meeting, width = Meeting(size), VOCAB // size
    parts = [VocabShard(rank * width, width, meeting.at(rank), rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(job, parts))


PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=5),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=0.9, top_k=7, top_p=0.6),
    SamplingParams(temperature=1.5, top_p=0.3, logprobs=20),
    SamplingParams(temperature=2.0, top_p=0.999, min_p=0.02),
    SamplingParams(temperature=1.0, min_p=0.3, logprobs=0),
    SamplingParams(temperature=0.8, top_k=90, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, logit_bias={3: 4.0, 40: -100.0, 95: 5.0}),
    SamplingParams(temperature=1.0, allowed_token_ids=[1, 17, 30, 47, 95]),
    SamplingParams(temperature=0, allowed_token_ids=[95]),
    SamplingParams(temperature=1.0, top_p=1e-6),
]


def sampled(params, logits_TW, drafts_Y, part=None, num_rounds=6):
    """Tokens and log-probabilities of some rounds with one sequence for each of `params`, two rows each."""
    sampler = Sampler(len(params), VOCAB, max_drafts=1, part=part)
    sampler.place(
        [
            Placement(
                slot,
                one,
                seed=slot * 7 + 1,
                prompt_ids=[5, 60, 60],
                output_ids=[31, 90],
                bad_words=[[31, 90, 2], [70]],
                sampling_mask=one.truncates,
            )
            for slot, one in enumerate(params)
        ]
    )
    slots = torch.arange(len(params)).repeat_interleave(2)
    offsets = torch.tensor([0, 1] * len(params))
    if part is not None:
        logits_TW = logits_TW[..., part.first : part.first + part.size]
    out = []
    for index in range(num_rounds):
        rows = Rows(slots.numpy(), slots, torch.full_like(slots, 5 + index) + offsets, offsets)
        out.append(sampler.sample(logits_TW[index], rows, drafts_Y))
    return out


@pytest.mark.parametrize("most_sought", [1 << 22, 100], ids=["at once", "in pieces"])
@pytest.mark.parametrize("kind", ["wide", "ties", "peaked"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_same_tokens_as_from_all_logits(size, kind, most_sought, seed, monkeypatch):
    monkeypatch.setattr(parts, "MAX_SEARCHED", most_sought)
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(6, 2 * len(PARAMS), VOCAB, generator=generator) * {"wide": 1.0, "ties": 1.0, "peaked": 20.0}[kind]
    )
    if kind == "ties":
        logits = logits.round()
    drafts_Y = torch.randint(0, VOCAB, (len(PARAMS) + 1, 1), generator=generator)
    want = sampled(PARAMS, logits, drafts_Y)
    ranks = together(size, lambda part: sampled(PARAMS, logits, drafts_Y, part))
    # Divided by the temperature, less the largest, less the logarithm of a sum: on each side three roundings.
    coldest = min(one.temperature for one in PARAMS if one.temperature)
    atol = 6 * torch.finfo(torch.float32).eps / 2 * 2 * logits.abs().max().item() / coldest
    for got in ranks:
        for ours, whole in zip(got, want, strict=True):
            assert torch.equal(ours.token_T, whole.token_T)
            assert torch.equal(ours.no_valid_token_T, whole.no_valid_token_T)
            found, known = ours.logprobs, whole.logprobs
            for name in ("logprob_T", "tempered_T", "top_logprob_TU"):
                torch.testing.assert_close(getattr(found, name), getattr(known, name), rtol=0, atol=atol)
            assert torch.equal(found.top_token_TU, known.top_token_TU)
            tempered = found.top_tempered_TU, known.top_tempered_TU
            torch.testing.assert_close(*tempered, rtol=1e-5, atol=1e-5)
            assert torch.equal(found.rank_T, known.rank_T)
            assert torch.equal(ours.mask_TU, whole.mask_TU)


def test_vocabularies_of_given_tokens_are_cut_for_each_rank():
    gen = torch.Generator().manual_seed(4)
    logits_TW = torch.randn(3, VOCAB, generator=gen)
    token_T = torch.tensor([70, 5, 40])
    kept = Kept.of([recorded_mask([70, 1, 30], VOCAB), b"", recorded_mask(range(20, 90), VOCAB)])

    def job(part):
        own_TW = logits_TW if part is None else logits_TW[:, part.first : part.first + part.size]
        return Sampler(1, VOCAB, part=part).logprobs(own_TW, token_T, 5, 0.7, kept)

    dropped_TW = kept.dropped(VOCAB)
    want_TW = (logits_TW.double() / 0.7).masked_fill(dropped_TW, -torch.inf).log_softmax(-1)
    for found in [job(None), *together(4, job)]:
        want_T = want_TW.gather(1, token_T[:, None])[:, 0].float()
        torch.testing.assert_close(found.tempered_T, want_T, rtol=0, atol=1e-5)  # float32, sums of 96 terms
        best_TU = want_TW.gather(1, found.top_token_TU).float()
        torch.testing.assert_close(found.top_tempered_TU, best_TU, rtol=0, atol=1e-5)


def test_rows_without_a_valid_token_are_found_on_every_rank():
    logits = torch.randn(1, 4, VOCAB)
    logits[0, 2] = torch.nan
    logits[0, 1, 60] = torch.nan
    params = [SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_p=0.5)]
    drafts = torch.zeros(3, 1, dtype=torch.int64)
    want = sampled(params, logits, drafts, num_rounds=1)[0].no_valid_token_T
    assert want.tolist() == [False, True, True, False]
    ranks = [got for (got,) in together(4, lambda part: sampled(params, logits, drafts, part, num_rounds=1))]
    for got in ranks:
        assert torch.equal(got.no_valid_token_T, want)
        assert ((got.token_T >= 0) & (got.token_T < VOCAB)).all()
        assert torch.equal(got.token_T, ranks[0].token_T), "ranks compare the tokens of a step"


def test_masks_of_grammars_hold_for_each_ranks_ids():
    logits = torch.zeros(2, VOCAB)
    allowed = [8, 50, 51, 94]
    bits = torch.zeros(96, dtype=torch.int64)
    bits[allowed] = 1
    words = (bits.view(3, 32) << torch.arange(32)).sum(dim=1)
    mask = torch.where(words >= 2**31, words - 2**32, words).int().repeat(1, 2, 1)

    def job(part):
        sampler = Sampler(1, VOCAB, max_drafts=1, part=part)
        sampler.place(
            [
                Placement(
                    0,
                    SamplingParams(temperature=1.0, logprobs=1).but(
                        structured_outputs=StructuredOutputsParams(regex="a")
                    ),
                    3,
                    [1],
                )
            ]
        )
        sampler.permit([0], mask.clone())
        slots = torch.zeros(2, dtype=torch.int64)
        tokens = []
        for position in range(60):
            rows = Rows(slots.numpy(), slots, torch.full_like(slots, position), torch.tensor([0, 1]))
            tokens += sampler.sample(logits[:, part.first : part.first + part.size], rows).token_T.tolist()
        return tokens

    ranks = together(4, job)
    assert ranks == [ranks[0]] * 4
    assert set(ranks[0]) == set(allowed)
