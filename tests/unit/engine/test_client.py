"""What a client makes of token ids: text, ends, several answers, seeds; and what it asks of the engine."""

import signal
import threading
from types import SimpleNamespace

import msgspec
import pytest
import torch
from msgspec.structs import replace

from glm5.checkpoint.handover import Buffers
from glm5.common.errors import CheckpointError, ConfigError, EngineDead, GlmError, MissingExtra, RequestError
from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.frontend.request_builder import Options
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams, StructuredOutputsParams, answer_seeds
from glm5.engine.transport.wire import RoutedExperts, TokenLogprobs, Update
from tests.support.cores import INFO, ScriptedCore
from tests.support.tokenizers import tiny_tokenizer

PLAIN = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture
def scripted(monkeypatch):
    """Makes an LLM over a scripted core, which is its `core`."""

    def make(tokenizer=None, **core) -> LLM:
        monkeypatch.setattr("glm5.engine.llm._core_of", lambda *args: ScriptedCore(**core))
        llm = LLM(SimpleNamespace(cfg=preset("tiny")), tokenizer)
        llm.core = llm.client.link.core
        return llm

    return make


class Speaking(ScriptedCore):
    """Says a text, `tokens_per_step` tokens at a time, with the end token behind it."""

    text = ""

    def _grow(self, seq_id):
        answer = self.running[seq_id]
        ids = [*tiny_tokenizer().encode(self.text), tiny_tokenizer().eos_ids[0]]
        token_ids = ids[answer.num_tokens : answer.num_tokens + self.tokens_per_step]
        answer.num_tokens += len(token_ids)
        reason = "stop" if answer.num_tokens == len(ids) else None
        if reason:
            del self.running[seq_id]
        return Update(seq_id, token_ids, 0, reason)


@pytest.fixture
def speaking(monkeypatch):
    """Makes an LLM whose engine says `text`."""

    def make(text, tokens_per_step=1) -> LLM:
        core = Speaking(tokens_per_step=tokens_per_step)
        core.text = text
        monkeypatch.setattr("glm5.engine.llm._core_of", lambda *args: core)
        llm = LLM(SimpleNamespace(cfg=preset("tiny")), tiny_tokenizer())
        llm.core = core
        return llm

    return make


def only(outputs):
    ((output,),) = [output.outputs for output in outputs]
    return output


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7, 50])
class TestStopStrings:
    """However many tokens come at a time, the answer is the same."""

    TEXT = "the weather in Paris is fine, the answer is: Berlin"

    def run(self, speaking, tokens_per_step, **changes):
        llm = speaking(self.TEXT, tokens_per_step)
        output = only(llm.generate("x", SamplingParams(max_tokens=None, **changes), use_tqdm=False))
        assert llm.client.num_unfinished == 0
        assert output.token_ids[:-1] == tiny_tokenizer().encode(self.TEXT)[: len(output.token_ids) - 1]
        return output

    def test_none(self, speaking, tokens_per_step):
        output = self.run(speaking, tokens_per_step)
        assert output.text == self.TEXT
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert output.token_ids[-1] == tiny_tokenizer().eos_ids[0]

    def test_found(self, speaking, tokens_per_step):
        output = self.run(speaking, tokens_per_step, stop=["ris is f", "never"])
        assert output.text == "the weather in Pa"
        assert (output.finish_reason, output.stop_reason) == ("stop", "ris is f")
        # The last token is the one that completed it.
        assert "ris is f" in tiny_tokenizer().decode(output.token_ids)
        assert "ris is f" not in tiny_tokenizer().decode(output.token_ids[:-1])

    def test_kept(self, speaking, tokens_per_step):
        output = self.run(speaking, tokens_per_step, stop="Paris", include_stop_str_in_output=True)
        assert output.text == "the weather in Paris"

    def test_not_before_min_tokens(self, speaking, tokens_per_step):
        num = len(tiny_tokenizer().encode("the weather in Paris is fine,"))
        output = self.run(speaking, tokens_per_step, stop="the", min_tokens=num)
        assert output.text == "the weather in Paris is fine, "


def test_the_engine_is_told_of_a_stop_string(speaking):
    llm = speaking("one two three four five six")
    only(llm.generate("x", SamplingParams(stop="two", max_tokens=None), use_tqdm=False))
    llm.pause()  # a call goes the same way, behind it
    assert llm.core.received == ["AddRequest", "StopAnswer", "PauseCall"]
    assert not llm.core.running


def test_stop_tokens_and_the_end_token(scripted):
    llm = scripted(tiny_tokenizer())
    requested = SamplingParams(max_tokens=9, stop_token_ids=[13])
    output = only(llm.generate([10], requested, use_tqdm=False))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([11, 12, 13], "stop", 13)
    assert set(llm.core.asks[0].stop_ids) == {13, *preset("tiny").eos_token_id}
    llm.generate([10], requested.but(ignore_eos=True), use_tqdm=False)
    assert llm.core.asks[1].stop_ids == (13,)
    shown = [only(llm.generate([10], requested.but(include_stop_str_in_output=kept), use_tqdm=False)).text
             for kept in (False, True)]  # fmt: skip
    assert shown[1] == shown[0] + tiny_tokenizer().decode([13])


def test_several_answers_to_a_prompt(scripted):
    llm = scripted(tokens_per_step=3)
    many = PLAIN.but(n=3, seed=2**64 - 1)
    one, other = llm.generate([[10], [20]], [many, PLAIN], use_tqdm=False)
    assert [out.index for out in one.outputs] == [0, 1, 2]
    assert [out.token_ids for out in one.outputs] == [list(range(11 + i, 19 + i)) for i in range(3)]
    assert other.outputs[0].token_ids == list(range(21, 29))
    ask = llm.core.asks[0]
    assert (len(ask.seq_ids), ask.params.n, ask.seeds) == (3, 1, tuple(answer_seeds(2**64 - 1, 3)))
    streamed = list(llm.stream([10], many))
    assert {delta.index for delta in streamed} == {0, 1, 2}
    assert [delta.finish_reason for delta in streamed].count("length") == 3


def test_seeds_come_from_the_engine_s_where_none_is_given(monkeypatch):
    def seeds(seed):
        monkeypatch.setattr("glm5.engine.llm._core_of", lambda *args: ScriptedCore())
        llm = LLM(SimpleNamespace(cfg=preset("tiny")), seed=seed)
        llm.generate([[1], [2], [3]], [PLAIN, PLAIN.but(seed=-1), PLAIN.but(n=2)], use_tqdm=False)
        return [ask.seeds for ask in llm.client.link.core.asks]

    first, second, third = seeds(4)
    assert second == (2**64 - 1,)  # the same 64 bits
    assert third == tuple(answer_seeds(third[0], 2))
    assert seeds(4) == [first, second, third]
    assert seeds(5)[0] != first


def test_max_tokens_is_resolved(scripted):
    llm = scripted()
    llm.generate([1] * 1020, PLAIN.but(max_tokens=None), use_tqdm=False)
    llm.generate([1] * 1020, PLAIN.but(max_tokens=50), use_tqdm=False)
    assert [ask.max_tokens for ask in llm.core.asks] == [4, 4]


def test_what_a_request_may_ask_beside_its_parameters(scripted):
    llm = scripted(tiny_tokenizer())
    words = PLAIN.but(bad_words=["the"])
    llm.generate(
        [{"prompt_token_ids": [1], "cache_salt": "tenant"}, {"prompt": "x"}],
        [words, PLAIN],
        priority=[7, 0],
        routed_experts=True,
        use_tqdm=False,
    )
    first, second = llm.core.asks
    assert (first.salt, first.priority, first.routed_experts) == (b"tenant", 7, True)
    assert (second.salt, second.priority) == (b"", 0)
    encode = tiny_tokenizer().encode
    assert set(first.bad_words) == {tuple(encode("the")), tuple(encode(" the"))} or len(first.bad_words) == 1


class Telling(ScriptedCore):
    """Reports log-probabilities and experts: of the prompt with the first update, as the engine does."""

    def _grow(self, seq_id):
        answer = self.running[seq_id]
        update = super()._grow(seq_id)
        num_prompt, first = len(answer.ask.prompt_ids), answer.num_tokens - len(update.token_ids)
        update.version = 3 + answer.num_tokens // 3
        update.logprobs = [
            TokenLogprobs(t, -0.5, -0.25, 2, [(t + 1, -0.1, -0.05), (t, -0.5, -0.25)]) for t in update.token_ids
        ]
        start = num_prompt - 1 + first if first or answer.index else 0
        stop = num_prompt + answer.num_tokens - 1
        update.routed = RoutedExperts(
            start, (stop - start, 1, 2), b"".join(bytes([t, 0, 9, 0]) for t in range(start, stop))
        )
        if not first and not answer.index:
            update.prompt_logprobs = [TokenLogprobs(t, -1.0, -1.0, 1) for t in answer.ask.prompt_ids[1:]]
        return update


def test_everything_that_training_asks_for(monkeypatch):
    monkeypatch.setattr("glm5.engine.llm._core_of", lambda *args: Telling(tokens_per_step=2))
    llm = LLM(SimpleNamespace(cfg=preset("tiny")), tiny_tokenizer())
    params = PLAIN.but(n=2, max_tokens=5, logprobs=1, prompt_logprobs=0)
    (out,) = llm.generate([10, 11, 12], params, use_tqdm=False, routed_experts=True)
    one, two = out.outputs
    assert [list(entry) for entry in one.logprobs] == [[t, t + 1] for t in one.token_ids]
    entry = one.logprobs[0][one.token_ids[0]]
    assert entry == (-0.5, 2, tiny_tokenizer().decode(one.token_ids[:1]), -0.25)
    assert one.cumulative_logprob == -2.5
    assert one.tempered_logprobs == [-0.25] * 5
    assert one.weight_versions == [3, 3, 4, 4, 4]
    assert [None if entry is None else next(iter(entry)) for entry in out.prompt_logprobs] == [None, 11, 12]
    for each in (one, two):
        assert each.routed_experts.tolist() == [[[position, 9]] for position in range(3 + 5 - 1)]
    assert out.num_cached_tokens == 0
    metrics = out.metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time


def test_ctrl_c_aborts_and_the_engine_goes_on(scripted):
    llm = scripted()
    steps = []

    def step(inner=llm.core.step):
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)  # in the middle of a step, which must not be cut in half
        return inner()

    llm.core.step = step
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], PLAIN, use_tqdm=False)
    assert llm.client.num_unfinished == 0
    assert only(llm.generate([5], PLAIN, use_tqdm=False)).token_ids == list(range(6, 14))
    assert llm.core.received == ["AddRequest", "AddRequest", "AbortRequests", "AbortRequests", "AddRequest"]
    assert not llm.core.running
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stream_that_is_left_is_aborted(scripted):
    llm = scripted()
    stream, other = llm.stream([1], PLAIN), llm.stream([100], PLAIN)
    assert next(stream).token_ids == (2,)
    assert next(other).token_ids == (101,)
    stream.close()
    assert [token for delta in other for token in delta.token_ids] == list(range(102, 109))
    assert "AbortRequests" in llm.core.received


def test_final_only_is_a_whole_answer(scripted):
    llm = scripted()
    (delta,) = llm.stream([1], PLAIN.but(output_kind="FINAL_ONLY"))
    assert (delta.token_ids, delta.finish_reason) == (tuple(range(2, 10)), "length")


def test_abort_all(scripted):
    llm = scripted()
    stream = llm.stream([1], PLAIN)
    next(stream)
    llm.abort_all()
    assert [delta.finish_reason for delta in stream][-1] == "abort"


class TestRefusals:
    """Before anything is sent."""

    BAD = [
        ([1], {"stop": "x"}, "stop strings need a tokenizer", "stop"),
        ([1], {"bad_words": ["x"]}, "bad words need a tokenizer", "bad_words"),
        ([1], {"structured_outputs": StructuredOutputsParams(regex="a")}, "grammars need a tokenizer", "structured"),
        ([1], {"logit_bias": {320: 1.0}}, "logit_bias holds 320; allowed: token ids below the vocab", "logit_bias"),
        ([1] * 1024, {}, "the prompt has 1024 tokens, the context is 1024", "prompt"),
        ([], {}, "the prompt is empty", "prompt"),
        ([320], {}, "the prompt holds the token id 320; allowed: 0 to 319", "prompt"),
    ]

    @pytest.mark.parametrize(("prompt", "changes", "message", "param"), BAD)
    def test_what_cannot_be_served(self, scripted, prompt, changes, message, param):
        llm = scripted()
        with pytest.raises(RequestError, match=f"prompt 1: {message}") as caught:
            llm.generate([[1], prompt], [PLAIN, PLAIN.but(**changes)], use_tqdm=False)
        assert caught.value.param.startswith(param)
        assert llm.core.received == []

    def test_more_pages_than_there_are(self, scripted):
        llm = scripted(info=replace(INFO, num_pages=2))
        with pytest.raises(RequestError, match="need 4 pages of 64 tokens, the cache has 2; lower max_tokens"):
            llm.generate([1] * 100, PLAIN.but(max_tokens=150), use_tqdm=False)

    def test_experts_that_are_not_recorded(self, scripted):
        llm = scripted(info=replace(INFO, routed_experts=False))
        with pytest.raises(RequestError, match="start it with enable_return_routed_experts"):
            llm.generate([1], PLAIN, use_tqdm=False, routed_experts=True)

    def test_a_grammar_without_its_package(self, scripted, monkeypatch):
        monkeypatch.setattr("glm5.engine.frontend.request_builder.find_spec", lambda name: None)
        llm = scripted(tiny_tokenizer())
        with pytest.raises(MissingExtra, match=r"pip install 'glm5\[grammar\]'"):
            llm.generate([1], PLAIN.but(structured_outputs=StructuredOutputsParams(regex="a")), use_tqdm=False)

    def test_one_priority_for_each(self, scripted):
        with pytest.raises(RequestError, match="2 priorities for 1 prompts"):
            scripted().generate([1], PLAIN, priority=[1, 2], use_tqdm=False)


def test_what_the_engine_refuses_later_names_the_prompt(scripted):
    llm = scripted()
    grow = llm.core._grow

    def fail_second(seq_id):
        update = grow(seq_id)
        return update if seq_id == 1 else Update(seq_id, [], 0, "error", "the grammar has no end")

    llm.core._grow = fail_second
    with pytest.raises(RequestError, match="prompt 1: the grammar has no end"):
        llm.generate([[1], [2]], PLAIN, use_tqdm=False)
    assert llm.client.num_unfinished == 0
    llm.core._grow = grow
    assert only(llm.generate([5], PLAIN, use_tqdm=False)).finish_reason == "length"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise@2", "ValueError: a bug in a step"),
        ("oom@2", r"MemoryError: no room; out of memory: lower gpu_memory_utilization"),
        ("torch-oom@2", "DefaultCPUAllocator: can't allocate memory: you tried 99 bytes; out of memory: lower"),
    ],
)
def test_a_failing_step_is_the_end_of_the_engine(scripted, script, reason, caplog):
    llm = scripted(script=script)
    with pytest.raises(EngineDead, match=f"the engine is not running: .*{reason}") as caught:
        llm.generate([[1], [2]], PLAIN, use_tqdm=False)
    assert caught.value.reason in str(caught.value)
    assert "the engine stopped" in caplog.text
    for call in (llm.stats, llm.pause, lambda: llm.generate([1], PLAIN, use_tqdm=False), lambda: next(llm.stream([1]))):
        with pytest.raises(EngineDead, match=reason):
            call()
    assert llm.core.is_closed
    llm.close()


def test_calls(scripted):
    llm = scripted()
    llm.pause()
    stream = llm.stream([1], PLAIN)
    assert llm.stats()["heard"] == ["PauseCall", "StatsCall"]
    llm.resume()
    assert next(stream).token_ids == (2,)
    assert llm.sleep() == 10
    assert llm.sleep(level=2) == 20
    llm.wake_up()
    llm.reset_prefix_cache()
    with pytest.raises(RequestError, match="level is 3; allowed: 1 or 2"):
        llm.sleep(3)
    with pytest.raises(RequestError, match="policy is 'mix'; allowed: keep, recompute, keep-session, abort"):
        llm.update_weights("x", policy="mix")


def test_weights_as_tensors_go_through_buffers_that_are_gone_afterwards(scripted, monkeypatch):
    llm, closed, close = scripted(), threading.Event(), Buffers.close
    monkeypatch.setattr(Buffers, "close", lambda self: (close(self), closed.set()))
    assert llm.update_weights({"model.norm.weight": torch.ones(64)}, version=7) == 7
    assert closed.wait(60)
    with pytest.raises(GlmError, match="no such directory"):
        llm.update_weights("/nowhere/at/all")
    with pytest.raises(GlmError, match="no tensors were given"):
        llm.update_weights({})
    with pytest.raises(GlmError, match=r"x is torch.complex64; allowed: "):
        llm.update_weights({"x": torch.ones(2, dtype=torch.complex64)})


def test_closing_is_the_end(scripted):
    with scripted() as llm:
        only(llm.generate([5], PLAIN, use_tqdm=False))
    llm.close()
    assert llm.core.is_closed
    with pytest.raises(EngineDead, match="it was closed"):
        llm.generate([5], PLAIN, use_tqdm=False)


def test_what_an_async_engine_took_over(scripted):
    llm = scripted()
    with AsyncEngine(llm), pytest.raises(GlmError, match="handed to an AsyncEngine"):
        llm.generate([5], PLAIN, use_tqdm=False)


def test_odd_calls_are_refused_and_nothing_of_them_stays(scripted):
    """Messages hold only some types and 64-bit numbers; what is beyond must not reach the engine, or be kept."""
    llm = scripted(tiny_tokenizer())
    calls = [
        *(lambda value=value: llm.generate([[1]], PLAIN, priority=value) for value in ([1.5], ["x"], [2**63], "x", 5)),
        *(lambda value=value: llm.generate([[1]], PLAIN, routed_experts=value) for value in (0, None, "x")),
        *(lambda value=value: llm.generate([[1]], value) for value in (5, [5], "x", {"n": 1})),
        *(lambda value=value: llm.generate(value, PLAIN) for value in (5, None, iter([[1]]))),
        lambda: list(llm.stream([1], {"n": 1})),
        *(lambda value=value: llm.update_weights("x", version=value) for value in (1.5, "x", True, -1, 2**63)),
        *(lambda value=value: llm.update_weights(value) for value in (5, None, ["x"], "\ud800")),
        *(lambda value=value: llm.sleep(value) for value in (True, 1.0, "1")),
        *(lambda value=value: llm.wake_up(value) for value in ("weights", [], ["x"], [[]], 5)),
    ]
    for call in calls:
        with pytest.raises(RequestError, match="allowed"):
            call()
    for weights in ({"lm_head.weight": 5}, {5: torch.zeros(1)}):
        with pytest.raises(CheckpointError, match="allowed: tensors by name"):
            llm.update_weights(weights)
    assert llm.client.num_unfinished == 0
    assert not llm.core.received


def test_numbers_beyond_the_context_are_asked_for_as_its_end(scripted):
    llm = scripted(tiny_tokenizer())
    wanted = StructuredOutputsParams(json={1: 2**70})
    far = PLAIN.but(max_tokens=2**70, min_tokens=2**70, thinking_token_budget=2**70, structured_outputs=wanted)
    llm.client.submit([1, 2], far, Options(num_speculative_tokens=2**70), lambda *_: None)
    llm.client.pump(0)
    llm.client.pump(0)
    (ask,) = llm.core.asks
    params, left = ask.params, llm.max_model_len - 2
    assert (ask.max_tokens, params.max_tokens, params.min_tokens, params.thinking_token_budget) == (left,) * 4
    assert ask.max_depth <= INFO.max_depth
    msgspec.msgpack.encode(ask)


def test_what_cannot_be_sent_is_forgotten(scripted, monkeypatch):
    llm = scripted()
    monkeypatch.setattr(llm.client.link, "send", lambda *messages: 1 / 0)
    for call in (lambda: llm.generate([[1]], PLAIN), llm.stats):
        with pytest.raises(ZeroDivisionError):
            call()
    assert llm.client.num_unfinished == 0
    assert not llm.client._calls


NOWHERE = [
    {"seed": 2**64},
    {"num_threads": 2**40},
    {"num_gpu_blocks_override": 2**70},
    {"kv_offloading_size": 1e300},
    {"kv_disk_size": float("inf")},
    {"kv_cache_memory_bytes": 2**70},
    {"max_num_seqs": 2**62},
]


@pytest.mark.parametrize("given", NOWHERE)
def test_settings_that_no_machine_has(given):
    """Refused before a process is started."""
    with pytest.raises(ConfigError, match=f"{next(iter(given))}: got .*; allowed: (below|at most)"):
        LLM("nowhere", **given)
