"""LLM.generate: the tokens of the plain model, the same whoever shares the batch, ended by every rule there is."""

import json

import pytest
import torch

from glm5.checkpoint.init import write_weightless
from glm5.common.errors import ConfigError, EngineDead, RequestError
from glm5.config.presets import preset
from glm5.engine.frontend.request_builder import Options
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from tests.support.engines import assert_nothing_left

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompts(rng, lengths, vocab=320):
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def one_shot_greedy(model, prompt, count):
    """The definition: the whole sequence through the model again for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_tokens_are_those_of_one_shot_logits(make_llm, tiny, rng):
    batch = prompts(rng, [1, 5, 8, 9, 31, 40, 2, 17])
    got = make_llm().generate(batch, GREEDY, use_tqdm=False)
    assert answers(got) == [one_shot_greedy(tiny, prompt, 12) for prompt in batch]
    assert {(out.outputs[0].finish_reason, out.outputs[0].stop_reason) for out in got} == {("length", None)}
    assert [out.prompt_token_ids for out in got] == batch


def test_sampled_tokens_do_not_depend_on_the_batch(make_llm, rng):
    batch = prompts(rng, [3, 20, 11, 7, 33, 1])
    each = [SamplingParams(temperature=1.5, top_p=0.9, top_k=50, seed=i, max_tokens=9 + i) for i in range(6)]
    together = answers(make_llm().generate(batch, each, use_tqdm=False))
    alone = make_llm(max_num_seqs=1, max_num_batched_tokens=7)
    assert together == [answers(alone.generate(p, s, use_tqdm=False))[0] for p, s in zip(batch, each, strict=True)]
    assert together[::-1] == answers(make_llm(max_num_seqs=3).generate(batch[::-1], each[::-1], use_tqdm=False))


def test_seeds_of_the_engine_are_reproducible_and_differ_between_requests(make_llm):
    params = SamplingParams(temperature=2.0, max_tokens=10, ignore_eos=True)
    first = answers(make_llm(seed=4).generate([[1, 2]] * 3, params, use_tqdm=False))
    assert first == answers(make_llm(seed=4).generate([[1, 2]] * 3, params, use_tqdm=False))
    assert len({tuple(ids) for ids in first}) == 3


def test_eos_ends_unless_ignored_and_stop_tokens_end_always(make_llm, tiny, rng, tmp_path):
    prompt = prompts(rng, [6])[0]
    free = one_shot_greedy(tiny, prompt, 12)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": free[4]}))
    llm = make_llm(generation_config=tmp_path)
    cut = free.index(free[4]) + 1

    def run(**changes):
        return llm.generate(prompt, GREEDY.but(**changes), use_tqdm=False)[0].outputs[0]

    out = run(ignore_eos=False)
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (free[:cut], "stop", None)
    assert run().token_ids == free
    out = run(stop_token_ids=[free[4]])
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (free[:cut], "stop", free[4])


def test_min_tokens_holds_the_end_off(make_llm, tiny, rng):
    prompt = prompts(rng, [6])[0]
    free = one_shot_greedy(tiny, prompt, 3)
    params = GREEDY.but(stop_token_ids=free, min_tokens=8)
    ids = make_llm().generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    assert len(ids) >= 9 or len(ids) == GREEDY.max_tokens
    assert not set(ids[:8]) & set(free)


def test_the_context_ends_the_answer(make_llm, rng):
    prompt = prompts(rng, [60])[0]
    for max_tokens in (None, 50):
        out = make_llm().generate(prompt, GREEDY.but(max_tokens=max_tokens), use_tqdm=False)[0].outputs[0]
        assert (len(out.token_ids), out.finish_reason) == (4, "length")


def test_logprobs_are_those_of_the_model(make_llm, tiny, rng):
    prompt = prompts(rng, [10])[0]
    out = make_llm().generate(prompt, GREEDY.but(logprobs=2, max_tokens=5), use_tqdm=False)[0].outputs[0]
    logprobs = tiny.logits(prompt + out.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
    for entry, token_id, row in zip(out.logprobs, out.token_ids, logprobs, strict=True):
        assert list(entry) == row.topk(2).indices.tolist()
        assert entry[token_id].logprob == pytest.approx(row[token_id].item(), abs=1e-4)
    sampled = [entry[token_id].logprob for entry, token_id in zip(out.logprobs, out.token_ids, strict=True)]
    assert out.cumulative_logprob == pytest.approx(sum(sampled))


def test_streaming_gives_the_same_and_closing_it_frees_the_pages(make_llm, rng):
    llm, prompt = make_llm(num_speculative_tokens=0), prompts(rng, [9])[0]
    want = answers(llm.generate(prompt, GREEDY, use_tqdm=False))[0]
    deltas = list(llm.stream(prompt, GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == want
    assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]
    stream = llm.stream(prompt, GREEDY)
    assert next(stream).token_ids == (want[0],)
    with pytest.raises(AssertionError):
        assert_nothing_left(llm)
    stream.close()
    assert_nothing_left(llm)


def test_a_failing_model_is_the_end(make_llm, monkeypatch):
    llm = make_llm()
    monkeypatch.setattr(llm.client.link.core.runner.model, "head", lambda hidden: 1 / 0)
    for _ in range(2):
        with pytest.raises(EngineDead, match="ZeroDivisionError: division by zero"):
            llm.generate([[1, 2], [3]], GREEDY, use_tqdm=False)
    assert llm.client.num_unfinished == 0


def test_requests_wait_for_pages(make_llm, rng):
    """With pages for two contexts and four seats, all get their answers, the first one first."""
    llm = make_llm(max_num_seqs=4, num_gpu_blocks_override=2)
    batch = prompts(rng, [30, 30, 30, 1, 30])
    streams = [llm.stream(prompt, GREEDY) for prompt in batch]
    together = answers(llm.generate(batch, GREEDY, use_tqdm=False))
    assert together == answers(make_llm().generate(batch, GREEDY, use_tqdm=False))
    finished = [out.metrics.finished_time for out in llm.generate(batch, GREEDY, use_tqdm=False)]
    assert finished[0] == min(finished)
    assert finished[3] > finished[0]
    assert all(list(stream) for stream in streams)
    assert_nothing_left(llm)


def test_decoding_goes_on_while_a_long_prompt_is_computed(make_llm, rng):
    """Another request gains a token in every step all the while."""
    client = make_llm(max_num_batched_tokens=4, max_num_seqs=2, num_speculative_tokens=0, max_model_len=128).client
    arrived = []

    def ask(prompt, name):
        def note(_, stream):
            arrived.extend([name] * len(stream.take()))

        client.submit(prompt, GREEDY.but(max_tokens=40), Options(), note)
        while name not in arrived:
            client.pump(0.1)

    ask([1, 2], "first")
    ask(prompts(rng, [30])[0], "second")
    # Of four tokens a step the first request takes one, so the prompt takes ten steps.
    assert arrived.count("first") >= 10


@pytest.mark.parametrize("form", ["ids", "list", "mapping", "mixed"])
def test_forms_of_prompts(make_llm, form):
    prompt = {"ids": [1, 2, 3], "list": [[1, 2, 3]], "mapping": {"prompt_token_ids": [1, 2, 3]},
              "mixed": [{"prompt_token_ids": [1, 2, 3]}]}[form]  # fmt: skip
    (output,) = make_llm().generate(prompt, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [1, 2, 3]
    assert make_llm().generate([], GREEDY) == []


BAD_PROMPTS = [
    ([[1]] * 2 + [[5] * 64], {}, r"prompt 2: the prompt has 64 tokens, the context is 64", "prompt"),
    ([[]], {}, "prompt 0: the prompt is empty", "prompt"),
    ([[1, 320]], {}, "holds token ids 1 to 320; allowed: 0 to 319", "prompt"),
    ([[-1]], {}, "allowed: 0 to 319", "prompt"),
    (
        ["text"],
        {},
        r"prompt 0 is text and there is no tokenizer; give token ids, or LLM\(..., tokenizer=PATH\)",
        "prompt",
    ),
    ([[1, "a"]], {}, r"prompt 0 is \[1, 'a'\]; allowed: a text or a list of token ids", "prompt"),
    ([[1]], {"stop_token_ids": [999]}, "stop_token_ids holds 999; allowed: token ids below", "stop_token_ids"),
    ([[1]], {"stop": "x"}, "stop strings need a tokenizer", "stop"),
]


@pytest.mark.parametrize(("batch", "changes", "message", "param"), BAD_PROMPTS)
def test_bad_prompts_are_refused_before_any_work(make_llm, batch, changes, message, param):
    llm = make_llm()
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(batch, GREEDY.but(**changes))
    assert caught.value.param == param
    assert not llm.client.link.core.has_work


def test_one_set_of_parameters_for_each_prompt_or_for_all(make_llm):
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        make_llm().generate([[1]], [GREEDY, GREEDY])


class TestSizes:
    def test_context_and_pages(self, make_llm, tiny, monkeypatch):
        assert make_llm(max_model_len=None).max_model_len == tiny.cfg.max_position_embeddings
        assert make_llm(max_model_len=65).client.info.num_pages == 2 * 4
        fits = make_llm(max_model_len=None, kv_cache_memory_bytes=2**20).client.info
        assert fits.max_model_len <= fits.num_pages * 64 < 2**14
        assert make_llm(num_gpu_blocks_override=3).client.info.num_pages == 3
        monkeypatch.setattr("glm5.engine.build.free_bytes", lambda device, share: 10 * 2**20)
        fits = make_llm(max_model_len=None, max_num_seqs=64, max_num_batched_tokens=64).client.info
        assert fits.num_pages * 64 >= fits.max_model_len

    def test_too_long_for_the_model(self, make_llm, tiny):
        longest = tiny.cfg.max_position_embeddings
        with pytest.raises(ConfigError, match=f"max_model_len: got {longest + 1}; allowed: up to {longest}"):
            make_llm(max_model_len=longest + 1)

    @pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs"])
    @pytest.mark.parametrize("number", [0, -2, 1.5, True])
    def test_numbers_that_are_none(self, make_llm, name, number):
        with pytest.raises(ConfigError, match=f"{name}: got {number!r}; allowed: (an integer|at least 1)"):
            make_llm(**{name: number})

    def test_settings_that_do_not_exist(self, make_llm):
        message = r"max_length: got 5; allowed: no such setting; did you mean max_model_len\?"
        with pytest.raises(ConfigError, match=message):
            make_llm(max_length=5)

    def test_too_long_for_the_memory(self, make_llm, monkeypatch):
        monkeypatch.setattr("glm5.engine.build.free_bytes", lambda device, share: 2**18)
        with pytest.raises(ConfigError, match=r"max_model_len: 1000 tokens take .* allowed here: up to \d+"):
            make_llm(max_model_len=1000)


def test_experts_of_a_model_without_them(tmp_path):
    path = write_weightless(preset("tiny", 1), tmp_path / "dense", fp8=False)
    with pytest.raises(ConfigError, match="none of this model's 1 layers has experts; allowed: false"):
        LLM(path, load_format="dummy", max_model_len=64, enable_return_routed_experts=True)


class TestGenerationConfig:
    @pytest.fixture
    def folder(self, tmp_path):
        def write(**keys):
            (tmp_path / "generation_config.json").write_text(json.dumps(keys))
            return tmp_path

        return write

    def test_sampling_and_eos(self, make_llm, folder):
        path = folder(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=33, eos_token_id=[7, 9], pad_token_id=0)
        llm = make_llm(generation_config=path)
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=33)
        assert llm.client.request_builder.eos_ids == {7, 9}
        assert llm.defaults.params(top_p=1.0).top_p == 1.0

    def test_none_of_it(self, make_llm, tiny):
        for choice in ("vllm", "auto"):
            llm = make_llm(generation_config=choice)
            assert llm.get_default_sampling_params() == SamplingParams()
            assert llm.client.request_builder.eos_ids == set(tiny.cfg.eos_token_id)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "is not JSON"),
            ("[]", "holds a list; expected a JSON object"),
            ('{"top_p": 3}', "top_p is 3; allowed: above 0, at most 1"),
            ('{"eos_token_id": "x"}', "eos_token_id is 'x'; allowed: a token id"),
        ],
    )
    def test_bad_files(self, make_llm, tmp_path, text, message):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            make_llm(generation_config=tmp_path)

    def test_a_folder_without_one(self, make_llm, tmp_path):
        with pytest.raises(ConfigError, match="allowed: auto, vllm, or a folder with generation_config"):
            make_llm(generation_config=tmp_path)


def test_nothing_is_kept_for_gradients(make_llm):
    llm = make_llm()
    llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert not any(part.requires_grad for part in llm.client.link.core.control.cache.parts().values())
    assert torch.is_grad_enabled()
