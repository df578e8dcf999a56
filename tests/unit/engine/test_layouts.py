"""The whole model over the three layouts of the cache, against itself without a cache and over unrounded keys."""

import random

import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.cache.kv_cache import KVCache
from glm5.model.packed import PackedView
from glm5.testing.numerics import rel_rms
from tests.support.cached import CachedRun, view_of
from tests.support.models import random_model

TINY, NANO = preset("tiny"), preset("nano")
LAYOUTS = ["auto", "fp8_key", "fp8"]
# Max abs difference of logits of unit scale. Measured over 60 seeds: float32 6e-6, float64 2e-14; one wrong page 0.8.
BUDGETS = {torch.float32: 1e-4, torch.float64: 1e-10}
# Relative RMS of logits over FP8 latents where nothing can be selected or routed otherwise. Measured over 12 seeds of
# tiny and nano: 1.5 to 2.1 %; with one bit less in e4m3 4.1 to 5.9 %.
FP8_BUDGET = 0.03
# Share of the selected keys that FP8 keys change in the first layer, whose inputs are the same. Measured over 12 seeds:
# tiny 2.0 to 3.5 % (8 keys of up to 150), nano 1.2 to 1.6 % (32 keys).
CHANGED_KEYS = 0.05


def sequences(seed: int, lengths: list[int], cfg=TINY) -> list[list[int]]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(cfg.vocab_size, (n,), generator=gen).tolist() for n in lengths]


@pytest.fixture(params=BUDGETS, ids=str, scope="module")
def model(request):
    return random_model(7, dtype=request.param)


@pytest.mark.parametrize("length", [1, 7, TINY.index_topk, TINY.index_topk + 1, 150])
def test_one_pass_over_pages_is_one_pass_without(model, length, seed):
    (ids,) = sequences(seed, [length])
    got = CachedRun(model, [ids]).finish().logits()
    assert (got - model.logits(ids)).abs().max() < BUDGETS[model.dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_do_not_show(layout, chunk, seed):
    """Of rounded keys too: a key is rounded once, when it is written."""
    model = random_model(7, dtype=torch.float64)
    ids = sequences(seed, [80])
    whole, parts = (CachedRun(model, ids, layout).finish(n) for n in (None, chunk))
    assert (parts.logits() - whole.logits()).abs().max() < BUDGETS[torch.float64]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_decoding_and_padding_in_one_pass(layout, seed):
    model = random_model(7, dtype=torch.float64)
    ids = sequences(seed, [20, 130, 12, 70])
    run = CachedRun(model, ids, layout)
    run.advance({0: 13}, num_padding=3)
    run.advance({0: 1, 1: 100}, num_padding=2)
    run.advance({2: 11, 0: 5, 1: 13, 3: 65}, num_padding=1)
    run.finish(chunk=1)
    for i, alone in enumerate(ids):
        want = CachedRun(model, [alone], layout).finish().logits()
        assert (run.logits(i) - want).abs().max() < BUDGETS[torch.float64]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_control_one_wrong_page_is_noticed(layout, seed):
    model = random_model(7, dtype=torch.float64)
    ids = sequences(seed, [130, 130])
    run, want = CachedRun(model, ids, layout), CachedRun(model, ids, layout).finish(64)
    run.advance({0: 129, 1: 129})
    run.pages[0][1] = run.pages[1][1]
    run.advance({0: 1, 1: 1})
    assert (run.logits(0)[129] - want.logits(0)[129]).abs().max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mtp_layer_has_pages_of_its_own(layout, seed):
    """MTP over a pool in two pieces equals MTP in one; over keys as they are, also MTP without a pool."""
    model = random_model(7, dtype=torch.float64)
    ids = torch.tensor(sequences(seed, [90])[0])
    drafts = []
    with torch.inference_mode():
        for pieces in ([(0, 89)], [(0, 60), (60, 89)]):
            cache = KVCache(TINY, 4, dtype=model.dtype, layout=layout, mtp=True)
            parts = []
            for start, end in pieces:
                view = view_of(cache, [([2, 1], start, end)])
                parts.append(model.draft(ids[start + 1 : end + 1], model(ids[start:end], view), view)[0])
            drafts.append(torch.cat(parts))
        view = PackedView([89])
        plain, _ = model.draft(ids[1:], model(ids[:-1], view), view)
    assert (drafts[0] - drafts[1]).abs().max() < BUDGETS[torch.float64]
    if layout == "auto":
        assert (drafts[0] - plain).abs().max() < BUDGETS[torch.float64]


@pytest.mark.parametrize("cfg", [TINY, NANO], ids=["tiny", "nano"])
def test_fp8_keys_change_the_choice_at_near_ties_and_nothing_else(cfg, seed):
    """The first layer chooses among the same keys with the same queries; the logits are the same up to the first token
    that any layer chooses other keys for. (Not to the bit: of an expert's rows there may be others, later ones.)"""
    model = random_model(seed % 1000, cfg, torch.float64)
    ids = sequences(seed, [150], cfg)
    exact, fp8 = (CachedRun(model, ids, layout).finish() for layout in ("auto", "fp8_key"))
    layers = exact.selected[0]
    changed = {i: [len(a - b) for a, b in zip(layers[i], fp8.selected[0][i], strict=True)] for i in layers}
    print({i: f"{sum(counts)} of {sum(map(len, layers[i]))}" for i, counts in changed.items()}, "keys changed by layer")
    assert 0 < sum(changed[0]) < CHANGED_KEYS * sum(map(len, layers[0]))
    first = next(t for t in range(150) if any(counts[t] for counts in changed.values()))
    assert first >= cfg.index_topk
    apart = (fp8.logits() - exact.logits()).abs().amax(dim=1)
    assert apart[:first].max() < BUDGETS[torch.float64]
    assert apart[first] > 1e3 * BUDGETS[torch.float64]


@pytest.mark.parametrize("cfg", [TINY, NANO], ids=["tiny", "nano"])
def test_fp8_latents_move_the_logits_by_their_rounding(cfg, seed, monkeypatch):
    """All keys are read and all experts run, so that nothing can jump: what is left is the rounding of latents."""
    smooth = cfg.replace(num_experts_per_tok=cfg.n_routed_experts, index_topk=150)
    model = random_model(seed % 1000, smooth, torch.float64)
    ids = sequences(seed, [150], cfg)
    exact = CachedRun(model, ids).finish().logits()
    error = rel_rms(CachedRun(model, ids, "fp8").finish().logits(), exact)
    print(f"relative RMS error of logits {error:.2%}")
    assert error < FP8_BUDGET

    import glm5.kernels.store_rows.reference as store

    quantize = store.quantize_latents

    def one_bit_less(latent_TL, form):
        row_TB = quantize(latent_TL, form)
        data = row_TB[:, : form.num_values].view(torch.float8_e4m3fn)
        mantissa, exponent = torch.frexp(data.float())
        row_TB[:, : form.num_values] = (
            torch.ldexp((mantissa * 8).round() / 8, exponent).to(data.dtype).view(torch.uint8)
        )
        return row_TB

    monkeypatch.setattr(store, "quantize_latents", one_bit_less)
    assert rel_rms(CachedRun(model, ids, "fp8").finish().logits(), exact) > FP8_BUDGET


def test_many_random_schedules_give_each_sequence_its_own_logits(rng: random.Random):
    """Random interleavings of chunks, in every layout."""
    model = random_model(7, dtype=torch.float64)
    for layout in LAYOUTS:
        ids = sequences(rng.randrange(10**6), [rng.randrange(1, 140) for _ in range(5)])
        run = CachedRun(model, ids, layout)
        while left := {i: len(one) - run.done[i] for i, one in enumerate(ids) if len(one) > run.done[i]}:
            chosen = rng.sample(sorted(left), rng.randrange(1, len(left) + 1))
            run.advance({i: rng.randrange(1, min(left[i], 40) + 1) for i in chosen}, num_padding=rng.randrange(3))
        for i, alone in enumerate(ids):
            want = CachedRun(model, [alone], layout).finish().logits()
            assert (run.logits(i) - want).abs().max() < BUDGETS[torch.float64]


def test_the_indexer_is_asked_only_where_it_can_leave_something_out(seed):
    run = CachedRun(random_model(7), sequences(seed, [TINY.index_topk + 1]))
    run.advance({0: TINY.index_topk})
    assert not run.selected[0]
    run.advance({0: 1})
    assert len(run.selected[0]) == TINY.indexer_types.count("full")
