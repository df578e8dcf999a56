"""Reading keys from pages gives the logits of one pass over the whole sequence, however the tokens come."""

import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.cache import PagedCache, PagedView, Span
from tests.support.models import random_model

CFG = preset("tiny")
# Max abs difference of logits of unit scale. Measured over 60 seeds: float32 6e-6, float64 2e-14; one wrong page 0.8.
BUDGETS = {torch.float32: 1e-4, torch.float64: 1e-10}
PAGE_SIZE = 4  # small, so that short sequences cross pages


class Batch:
    """Sequences in one cache, advanced by hand. Their pages are interleaved, so no request's are contiguous."""

    def __init__(self, model, sequences, *, page_size=PAGE_SIZE):
        self.model, self.sequences = model, sequences
        self.cache = PagedCache(model.cfg, 64, dtype=model.dtype, page_size=page_size)
        self.done = [0] * len(sequences)
        self.pages = [[] for _ in sequences]
        for _ in range(self.cache.pages_for(max(map(len, sequences)))):
            for pages in self.pages:
                pages += self.cache.allocate(1)
        self.logits = [[] for _ in sequences]

    def advance(self, counts: dict[int, int]) -> None:
        """Compute `counts[i]` more tokens of sequence i, all in one pass, in the order of the dict."""
        spans = [Span(self.pages[i], self.done[i], n) for i, n in counts.items()]
        ids = [token for i, n in counts.items() for token in self.sequences[i][self.done[i] : self.done[i] + n]]
        with torch.inference_mode():
            logits = self.model.head(self.model(torch.tensor(ids), PagedView(self.cache, spans)))
        for (i, n), part in zip(counts.items(), logits.split(list(counts.values())), strict=True):
            self.done[i] += n
            self.logits[i].append(part)

    def error(self, i: int = 0) -> float:
        got, want = torch.cat(self.logits[i]), self.model.logits(self.sequences[i])
        assert got.shape == want.shape
        return (got - want).abs().max().item()


def sequences(seed: int, lengths: list[int]) -> list[list[int]]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(CFG.vocab_size, (n,), generator=gen).tolist() for n in lengths]


@pytest.fixture(params=BUDGETS, ids=str, scope="module")
def model(request):
    return random_model(7, dtype=request.param)


@pytest.mark.parametrize("length", [1, 7, CFG.index_topk, CFG.index_topk + 1, 37])
@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_prefill_in_chunks_equals_one_pass(model, length, chunk, seed):
    batch = Batch(model, sequences(seed, [length]))
    while batch.done[0] < length:
        batch.advance({0: min(chunk, length - batch.done[0])})
    assert batch.error() < BUDGETS[model.dtype]


def test_prefill_then_decode_in_a_batch_of_different_lengths(model, seed):
    lengths = [37, 5, 18, 1]
    batch = Batch(model, sequences(seed, [n + 9 for n in lengths]))
    batch.advance(dict(enumerate(lengths)))
    for _ in range(9):
        batch.advance(dict.fromkeys((2, 0, 3, 1), 1))
    assert max(batch.error(i) for i in range(4)) < BUDGETS[model.dtype]


def test_prompts_and_decoding_requests_may_share_a_pass(model, seed):
    batch = Batch(model, sequences(seed, [20, 30, 12]))
    batch.advance({0: 13})
    batch.advance({0: 1, 1: 17})
    batch.advance({2: 12, 0: 5, 1: 13})
    batch.advance({0: 1})
    assert max(batch.error(i) for i in range(3)) < BUDGETS[model.dtype]


def test_a_page_of_many_tokens(model, seed):
    batch = Batch(model, sequences(seed, [70, 3]), page_size=64)
    batch.advance({0: 66, 1: 1})
    for _ in range(2):
        batch.advance({0: 1, 1: 1})
    batch.advance({0: 2})
    assert max(batch.error(i) for i in range(2)) < BUDGETS[model.dtype]


def test_control_one_wrong_page_is_noticed(model, seed):
    batch = Batch(model, sequences(seed, [20, 20]))
    batch.advance({0: 19, 1: 19})
    batch.pages[0][1] = batch.pages[1][1]
    batch.advance({0: 1})
    batch.sequences[0] = batch.sequences[0][:20]
    assert batch.error() > 100 * BUDGETS[model.dtype]


def test_the_indexer_is_asked_only_where_it_can_leave_something_out(monkeypatch, seed):
    calls = []
    import glm5.engine.cache as cache_module

    score = cache_module.index_score
    monkeypatch.setattr(cache_module, "index_score", lambda *args, **kw: calls.append(1) or score(*args, **kw))
    model = random_model(7)
    batch = Batch(model, sequences(seed, [CFG.index_topk + 1]))
    batch.advance({0: CFG.index_topk})
    assert not calls
    batch.advance({0: 1})
    assert len(calls) == sum(kind == "full" for kind in CFG.indexer_types)


def test_draft_reads_the_mtp_layers_own_pages(seed):
    """MTP over a paged cache in two pieces equals MTP over the packed view."""
    from glm5.model.packed import PackedView

    model = random_model(7, dtype=torch.float64)
    ids = torch.tensor(sequences(seed, [24])[0])
    cache = PagedCache(CFG, 8, dtype=model.dtype, page_size=PAGE_SIZE, mtp=True)
    pages = cache.allocate(6)
    with torch.inference_mode():
        view = PackedView([23])
        hidden = model(ids[:-1], view)
        want, _ = model.draft(ids[1:], hidden, view)
        got = []
        for start, count in ((0, 15), (15, 8)):
            view = PagedView(cache, [Span(pages, start, count)])
            part = model(ids[start : start + count], view)
            got.append(model.draft(ids[start + 1 : start + count + 1], part, view)[0])
    assert (torch.cat(got) - want).abs().max() < BUDGETS[torch.float64]


def test_pages_are_handed_out_once_and_come_back():
    cache = PagedCache(CFG, 5, dtype=torch.float32)
    first, second = cache.allocate(2), cache.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert cache.num_free == 0
    cache.release(first)
    assert sorted(cache.allocate(2)) == sorted(first)
    with pytest.raises(AssertionError):
        cache.allocate(1)


def test_bytes_per_page_are_what_a_page_takes():
    for mtp in (False, True):
        cache = PagedCache(CFG, 1, dtype=torch.bfloat16, mtp=mtp)
        held = [*cache.latent_PZL, *cache.index_key_PZI.values()]
        assert PagedCache.bytes_per_page(CFG, torch.bfloat16, mtp=mtp) == sum(t.nbytes for t in held)
        assert len(cache.latent_PZL) == CFG.num_hidden_layers + mtp
