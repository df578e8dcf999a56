"""The exact training pass: bit for bit the log-probabilities that a deterministic engine reported of what it drew.

Every comparison of log-probabilities here is for equality. The controls: the definition's own training pass, and faults
that a trainer could have (no temperature, tokens shifted by one, weights of one step before).
"""

import copy
from functools import partial

import pytest
import torch

from glm5.common.errors import ConfigError, TrainingError
from glm5.config.presets import preset
from glm5.config.step import OptimizerConfig
from glm5.engine import arithmetic, build
from glm5.engine.frontend.request_builder import Options
from glm5.engine.llm import LLM
from glm5.engine.runner.runner import Runner
from glm5.engine.sampling.params import SamplingParams
from glm5.kernels.sampled_logprobs import kept_ids, sampled_logprobs
from glm5.model.moe import RecordedExperts
from glm5.model.packed import PackedView
from glm5.model.seams import Selection
from glm5.rl.algorithms.table import preset_of
from glm5.rl.training import exact as exact_module
from glm5.rl.training.exact import ExactPass
from glm5.rl.training.objective import RLObjective
from glm5.rl.training.policy import policy_step
from glm5.train.batch import Batch
from tests.support.exact import REPORTED, Drawn, answers, default_logprobs, num_unlike, prompts_of
from tests.support.masks import kept_of
from tests.support.models import random_model
from tests.support.rounding import logit_rounding

NATIVE = pytest.param("native", marks=pytest.mark.compiler)
TORCH = pytest.param("torch", marks=pytest.mark.slow)
CROWDED = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_speculative_tokens": 3}
ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False}


@pytest.fixture(params=[NATIVE, "torch"])
def layers(request, monkeypatch):
    """What engine and trainer run on. "fused": on torch, in the form for GPUs."""
    if request.param != "native":
        monkeypatch.setattr(arithmetic, "use_native", lambda _model, **_: False)
    if request.param == "fused":
        monkeypatch.setattr(build, "Runner", partial(Runner, fused=True))
    return request.param


def engine(model, **settings) -> LLM:
    return LLM(model, max_model_len=256, deterministic=True, num_threads=1, **settings)


def trained(seed, cfg=None):
    return random_model(seed, cfg).requires_grad_()


@pytest.mark.parametrize("layers", [NATIVE, "torch", "fused"], indirect=True)
@pytest.mark.parametrize("settings", [CROWDED, pytest.param(ALONE, marks=pytest.mark.slow)], ids=["crowded", "alone"])
def test_every_sampled_token_has_the_engines_bits(layers, settings, seed, rng):
    """Temperatures, cuts, two turns, chunks, prefix hits, drafts; before and after a step of the optimizer."""
    model = trained(seed)
    with engine(model, **settings) as llm:
        exact = ExactPass(model, threads=1, fused=layers == "fused")
        exact.check(llm.client.info.arithmetic)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for version in range(2):
            drawn = answers(llm, rng, **({} if layers == "native" else {"turns": 1, "max_tokens": 4, "longest": 40}))
            assert set(drawn.versions) == {version}
            logprob_G = drawn.scored(exact)
            assert num_unlike(logprob_G, drawn.reported) == 0
            shown = default_logprobs(model, drawn)
            (-logprob_G.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if settings is CROWDED and layers == "native":
            assert llm.stats()["prefix_cache"]["hit_tokens"]["device"] > 0
            assert sum(llm.stats()["speculation"]["drafted"]) > 0
    # The controls: the definition's pass, weights of one step later, no temperature, and a token shifted by one.
    assert num_unlike(shown, drawn.reported) > len(shown) / 10
    assert num_unlike(drawn.scored(exact), drawn.reported) > len(shown) / 2
    plain = torch.ones_like(drawn.temperatures)
    assert num_unlike(drawn.scored(exact, plain), drawn.reported) > len(shown) / 2
    assert num_unlike(drawn.scored(exact).roll(1), drawn.reported) > len(shown) / 2


CUTS = ({"top_p": 0.95}, {"min_p": 0.02, "temperature": 1.5}, {"top_p": 0.2}, {"top_k": 3}, {"top_p": 1 - 1e-6})


@pytest.mark.parametrize("layers", [NATIVE, TORCH], indirect=True)
def test_recorded_masks_give_the_engines_bits(layers, seed, rng):
    """With top_p or min_p alone, too, whatever a mask takes; after a step of the optimizer those that were recorded
    are not those that the new weights would leave."""
    model = trained(seed)
    drawn, masks = Drawn(prompts_of(rng, model.cfg.vocab_size, [5, 40, 90, 30, 7])), list[bytes]()
    with engine(model, max_num_seqs=4, max_num_batched_tokens=32, num_speculative_tokens=3) as llm:
        for number, how in enumerate(CUTS):
            params = SamplingParams(max_tokens=8, **REPORTED, seed=number, **how)
            request = llm._read(drawn.sequences[number], params, Options(sampling_mask=True), "the prompt")
            for _, delta in llm._run([request], {}, interval=1):
                drawn.add(number, delta.token_ids, delta.tempered_logprobs, [0] * len(delta.token_ids), params)
                masks += delta.sampling_mask
    exact = ExactPass(model, threads=1)

    def scored(kept) -> torch.Tensor:
        hidden_TD = exact.hidden(drawn.ids, drawn.lengths)[drawn.rows]
        return exact.logprobs(hidden_TD, model.lm_head.weight, drawn.targets, drawn.temperatures, kept)[0]

    found = scored(kept_of(masks))
    assert num_unlike(found, drawn.reported) == 0
    words = -(-model.cfg.vocab_size // 32)
    sizes = [len(kept_ids(mask)) for mask in masks]
    print(f"token ids {min(sizes)} to {max(sizes)}, at most {max(map(len, masks))} bytes")
    assert min(sizes) <= 3
    assert max(sizes) > 8 * words
    assert max(map(len, masks)) == 4 * (1 + words)
    # Controls: all tokens, and the masks of other tokens.
    assert num_unlike(scored(None), drawn.reported) > len(masks) / 2
    assert num_unlike(scored(kept_of(masks[::-1])), drawn.reported) > len(masks) / 2
    (-found.mean()).backward()
    torch.optim.SGD(model.parameters(), lr=10.0).step()
    own = scored(drawn.kept(exact, exact.hidden(drawn.ids, drawn.lengths)[drawn.rows].detach()))
    assert num_unlike(own, scored(kept_of(masks))) > 0


@pytest.mark.parametrize("layers", [NATIVE, TORCH], indirect=True)
def test_each_version_of_the_weights_in_an_answer_is_exact(layers, seed, rng):
    """Weights change in the middle of answers, with the policy `recompute`: a token belongs to its version."""
    model = trained(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    drawn, weights = Drawn(prompts_of(rng, model.cfg.vocab_size, [5, 40, 90])), [copy.deepcopy(model.state_dict())]
    params = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, logprobs=0, seed=7)
    with engine(model, max_num_seqs=3, max_num_batched_tokens=32) as llm:
        streams = dict(enumerate([llm.stream(ids, params) for ids in drawn.sequences]))
        num_deltas = 0
        while streams:
            for number, stream in list(streams.items()):
                if (delta := next(stream, None)) is None:
                    del streams[number]
                    continue
                num_deltas += 1
                versions = [delta.version] * len(delta.token_ids)
                drawn.add(number, delta.token_ids, delta.tempered_logprobs, versions, params)
                if num_deltas in (9, 21):
                    model(torch.tensor([1, 2, 3]), PackedView([3])).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    weights.append(copy.deepcopy(model.state_dict()))
    assert set(drawn.versions) == {0, 1, 2}
    exact, version_G = ExactPass(model, threads=1), torch.tensor(drawn.versions)
    for version, state in enumerate(weights):
        model.load_state_dict(state)
        logprob_G = drawn.scored(exact)
        own_G = version_G == version
        assert num_unlike(logprob_G[own_G], drawn.reported[own_G]) == 0
        assert num_unlike(logprob_G[~own_G], drawn.reported[~own_G]) > int((~own_G).sum()) / 2


# The gradient's error in float32 relative to its size: as that of logits, through twice as many products.
GRADIENT = 2 * logit_rounding(preset("tiny"))


def gradients(model, logprob_G, entropy_G) -> dict[str, torch.Tensor]:
    """Of a policy gradient with an entropy bonus."""
    weight_G = torch.linspace(-1, 1, len(logprob_G), dtype=logprob_G.dtype)
    model.zero_grad()
    ((weight_G * logprob_G).sum() + 0.1 * entropy_G.sum()).backward()
    return {name: weight.grad.double() for name, weight in model.named_parameters() if weight.grad is not None}


def scored(model, ids_T, lengths, score):
    hidden_TD = model(ids_T, PackedView(lengths))
    temperature_G = torch.linspace(0.3, 1.5, len(ids_T))
    return score(hidden_TD, model.lm_head.weight, ids_T.roll(-1), temperature_G.to(hidden_TD.dtype))


@pytest.mark.parametrize("fault", [None, "keys", "experts"])
def test_gradients_are_those_of_the_definition_in_float64(fault, layers, seed, rng, monkeypatch):
    """Also where rounding chose other keys or experts than float64 does: none here, as the test checks. Two sequences
    begin as another does, one of them with more than a page of it."""
    model = trained(seed)
    wide = copy.deepcopy(model).double()
    one, two, three = prompts_of(rng, model.cfg.vocab_size, [90, 20, 1])
    sequences = [one, three, one[:70] + two, one[:7]]
    lengths = [len(ids) for ids in sequences]
    ids_T = torch.tensor([token_id for ids in sequences for token_id in ids])
    exact = model.impl = ExactPass(model, threads=1)
    want = gradients(wide, *scored(wide, ids_T, lengths, sampled_logprobs))
    if fault == "keys":
        monkeypatch.setattr(exact_module, "Selection", lambda _keys_TK: Selection(None))
    elif fault == "experts":
        monkeypatch.setattr(exact_module, "RecordedExperts", lambda expert_UA: RecordedExperts(expert_UA.roll(1, 0)))
    got = gradients(model, *scored(model, ids_T, lengths, exact.logprobs))
    assert got.keys() == want.keys()
    assert not any("indexer" in name for name in got)
    error = {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want}
    print(f"largest error {max(error.values()):.1e}, allowed {GRADIENT:.1e}")
    assert (max(error.values()) < GRADIENT) == (fault is None)


@pytest.mark.parametrize("layers", [NATIVE, TORCH], indirect=True)
def test_the_ratio_of_a_training_step_is_one(layers, seed, rng):
    """As a run trains: the objective's own metrics, exactly, and not for the definition's pass."""
    model = trained(seed)
    with engine(model, max_num_seqs=4) as llm:
        drawn = answers(llm, rng, turns=1, ways=[{"temperature": 0.7}, {"temperature": 1.3}])
    ids = [len(one) for one in drawn.sequences]
    place_G = torch.tensor([sum(ids[:number]) + position + 1 for number, position in drawn.place])
    values = {"policy": torch.ones(len(place_G)), "rollout": drawn.reported, "temperature": drawn.temperatures}
    values["advantage"] = torch.linspace(-1, 1, len(place_G))
    columns = {name: torch.zeros(sum(ids)).index_copy_(0, place_G, value) for name, value in values.items()}
    ids_T = torch.tensor([token_id for one in drawn.sequences for token_id in one])
    batch = Batch(ids_T, torch.zeros(len(ids_T)), ids, columns=columns)
    metrics = []
    for is_exact in (True, False):
        exact = ExactPass(model, threads=1)
        model.impl = exact if is_exact else None
        scorer = exact.logprobs if is_exact else sampled_logprobs
        step = policy_step(model, RLObjective(preset_of("grpo"), scorer=scorer), OptimizerConfig(kind="adamw"))
        metrics.append(step.run([batch], 0.0))
    assert (metrics[0]["ratio"], metrics[0]["mismatch_kl"], metrics[0]["masked"]) == (1.0, 0.0, 0.0)
    assert metrics[1]["mismatch_kl"] > 0.0


def test_what_cannot_be_exact_is_refused(seed, monkeypatch):
    model = trained(seed)
    exact = model.impl = ExactPass(model, threads=1)
    for view in (PackedView([3], stage="dense"), PackedView([3], learn_index=True)):
        with pytest.raises(TrainingError, match="train with sparse attention and frozen indexers"):
            model(torch.tensor([1, 2, 3]), view)
    with pytest.raises(ConfigError, match="the engine computes in an order that depends on the batch, this training"):
        exact.check(None)
    monkeypatch.setattr(arithmetic, "use_native", lambda _model, **_: False)
    with pytest.raises(ConfigError, match="threads: the engine has 2, and torch 1 here"):
        ExactPass(trained(seed), threads=2)


WIDE = preset("nano").replace(index_topk=24)
ODD = preset("tiny").replace(num_nextn_predict_layers=0, first_k_dense_replace=0, n_shared_experts=2)
ENGINES = {
    "alone": ALONE,
    "crowded": {"max_num_seqs": 16},
    "chunks of 7": {"long_prefill_token_threshold": 7, "max_num_seqs": 3},
    "no cache": {"enable_prefix_caching": False},
    "preemption": {"max_num_seqs": 6, "num_gpu_blocks_override": 10},
}


@pytest.mark.long
@pytest.mark.parametrize("layers", [NATIVE, "torch", "fused"], indirect=True)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cfg", [preset("tiny"), WIDE, ODD], ids=["tiny", "nano", "odd"])
@pytest.mark.parametrize("name", ENGINES)
def test_every_bit_in_every_way(layers, threads, cfg, name, seed, rng):
    """Of longer conversations, by several steps of an optimizer."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = trained(seed, cfg)
        drafts = 3 if cfg.num_nextn_predict_layers else 0
        settings = {"num_speculative_tokens": drafts, "num_threads": threads} | ENGINES[name]
        with LLM(model, max_model_len=320, deterministic=True, **settings) as llm:
            exact = ExactPass(model, threads=threads, fused=layers == "fused")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(2):
                drawn = answers(llm, rng, turns=3, max_tokens=16, longest=150)
                logprob_G = drawn.scored(exact)
                assert num_unlike(logprob_G, drawn.reported) == 0
                (-logprob_G.mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.set_num_threads(before)
