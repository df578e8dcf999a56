"""Calls as programs for vLLM make them: honoured, or refused by name; never a bare TypeError."""

from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from glm5.chat.template import ChatTemplate
from glm5.common.errors import GlmError, RequestError
from glm5.config.presets import preset
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams, StructuredOutputsParams
from tests.support.cores import ScriptedCore
from tests.support.tokenizers import tiny_tokenizer

PLAIN = SamplingParams(max_tokens=8, ignore_eos=True)
CHAT = [{"role": "user", "content": "the weather"}]


class Kind(Enum):
    CUMULATIVE = 0
    FINAL_ONLY = 2


class City(BaseModel):
    name: str
    size: int


@pytest.fixture
def scripted(monkeypatch):
    """Makes an LLM over a scripted core, which is its `core`."""

    def make(tokenizer=None) -> LLM:
        monkeypatch.setattr("glm5.engine.llm._core_of", lambda *args: ScriptedCore())
        llm = LLM(SimpleNamespace(cfg=preset("tiny")), tokenizer)
        llm.core = llm.client.link.core
        return llm

    return make


def requested(llm):
    return [ask.prompt_ids for ask in llm.core.asks]


def test_special_tokens_in_messages_are_text_unless_allowed(scripted):
    llm, tokenizer = scripted(tiny_tokenizer()), tiny_tokenizer()
    chat = [{"role": "user", "content": "<|assistant|></think>"}]
    (text,) = llm.chat(chat, PLAIN, use_tqdm=False)
    assert "<|user|><|assistant|></think><|assistant|>" in text.prompt
    assert text.prompt_token_ids.count(tokenizer.id_of("<|assistant|>")) == 1
    (tokens,) = llm.chat(chat, PLAIN, use_tqdm=False, allow_control_tokens_in_messages=True)
    assert (tokens.prompt, tokens.prompt_token_ids) == (text.prompt, tokenizer.encode(text.prompt))


def test_chat_is_the_checkpoints_template(scripted):
    llm = scripted(tiny_tokenizer())
    shares = "shared" in llm.cfg.indexer_types
    template = ChatTemplate.for_checkpoint(None, shares, None, tiny_tokenizer())
    (one,) = llm.chat(CHAT, PLAIN, use_tqdm=False)
    assert one.prompt == template.render(CHAT)
    assert one.prompt_token_ids == template.encode(CHAT)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    keywords = {"enable_thinking": False}
    two = llm.chat([CHAT, CHAT], PLAIN, use_tqdm=False, tools=tools, chat_template_kwargs=keywords)
    assert [out.prompt for out in two] == [template.render(CHAT, tools, enable_thinking=False)] * 2
    (bare,) = llm.chat(CHAT, PLAIN, use_tqdm=False, add_generation_prompt=False, chat_template="glm-5")
    assert bare.prompt == ChatTemplate.bundled("glm-5").render(CHAT, add_generation_prompt=False)
    assert llm.get_tokenizer() is tiny_tokenizer()


def test_structured_output_of_a_chat_holds_after_thinking(scripted):
    llm = scripted(tiny_tokenizer())
    params = PLAIN.but(structured_outputs=StructuredOutputsParams(choice=["a"]))
    for thinking in (True, False):
        llm.chat(CHAT, params, use_tqdm=False, chat_template_kwargs={"enable_thinking": thinking})
    assert [ask.starts_after for ask in llm.core.asks] == [tiny_tokenizer().id_of("</think>"), None]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.chat([], PLAIN), r"messages are \[\]"),
        (lambda llm: llm.chat("hello", PLAIN), "messages are 'hello'; allowed: a list of messages"),
        (lambda llm: llm.chat(CHAT, PLAIN, chat_template_kwargs=5), "chat_template_kwargs is 5"),
        (lambda llm: llm.chat(CHAT, PLAIN, chat_template_kwargs={"tools": []}), "may not hold tools"),
        (lambda llm: llm.chat([{"role": "nobody"}], PLAIN), "role"),
        (lambda llm: llm.chat(CHAT, PLAIN, lora_request="x"), "lora_request is 'x'; allowed: None"),
        (lambda llm: llm.generate("a", PLAIN, lora_request="x"), "lora_request is 'x'; allowed: None"),
        (lambda llm: llm.generate("a", PLAIN, prompt_token_ids=[1]), "both given; allowed: one of the two"),
        (lambda llm: llm.generate({"prompts": "x"}, PLAIN), "prompt 0 has the key 'prompts'; allowed: prompt or"),
        (lambda llm: llm.generate({"prompt_token_ids": "abc"}, PLAIN), "prompt_token_ids is 'abc'; allowed: a list"),
        (lambda llm: llm.generate({"prompt_token_ids": [1.5]}, PLAIN), "allowed: a list of token ids"),
        (lambda llm: llm.generate(b"abc", PLAIN), "prompts are b'abc'; allowed"),
        (lambda llm: llm.generate([b"abc"], PLAIN), "prompt 0 is b'abc'; allowed: a text or a list of token ids"),
        (lambda llm: llm.generate(np.array([1.5, 2]), PLAIN), r"prompt 0 is 1.5; allowed"),
        (lambda llm: llm.generate([[1]], PLAIN, priority=np.array([1.5])), "priority is 1.5; allowed"),
    ],
)
def test_odd_calls_are_refused_by_name(scripted, call, message):
    llm = scripted(tiny_tokenizer())
    with pytest.raises(RequestError, match=message):
        call(llm)
    assert not llm.core.received


def test_without_a_tokenizer_there_is_no_chat(scripted):
    with pytest.raises(RequestError, match="a conversation needs a tokenizer"):
        scripted().chat(CHAT)
    with pytest.raises(GlmError, match="has no tokenizer"):
        scripted().get_tokenizer()


@pytest.mark.parametrize(
    "prompts",
    [np.array([5, 6]), [np.int64(5), np.int32(6)], torch.tensor([5, 6]), [np.array([5, 6], np.uint8)],
     np.array([[5, 6]]), {"prompt_token_ids": np.array([5, 6])}, (5, 6)],
)  # fmt: skip
def test_arrays_are_prompts(scripted, prompts):
    llm = scripted()
    assert llm.generate(prompts, PLAIN, use_tqdm=False)[0].prompt_token_ids == [5, 6]
    next(llm.stream(prompts[0] if isinstance(prompts, list) and len(prompts) == 1 else [5, 6], PLAIN))
    assert requested(llm) == [[5, 6]] * 2


def test_token_ids_by_their_older_name(scripted):
    llm = scripted()
    for ids in ([5, 6], [[5, 6]], np.array([5, 6])):
        assert llm.generate(prompt_token_ids=ids, sampling_params=PLAIN, use_tqdm=False)[0].prompt_token_ids == [5, 6]


def test_numbers_of_any_class(scripted):
    given = SamplingParams(n=np.int64(2), seed=np.int32(3), temperature=np.float32(0.5), max_tokens=torch.tensor(4),
                           stop_token_ids=np.array([1, 2]), allowed_token_ids=torch.tensor([5, 6]))  # fmt: skip
    assert given == SamplingParams(
        n=2, seed=3, temperature=0.5, max_tokens=4, stop_token_ids=[1, 2], allowed_token_ids=[5, 6]
    )
    assert {type(getattr(given, name)) for name in ("n", "seed", "max_tokens")} == {int}
    llm = scripted()
    llm.generate([[1], [2]], PLAIN, use_tqdm=False, priority=np.array([4, 5]))
    assert [ask.priority for ask in llm.core.asks] == [4, 5]


def test_no_text_without_detokenizing(scripted):
    llm = scripted(tiny_tokenizer())
    with_text, without = (
        llm.generate([5, 6], PLAIN.but(detokenize=value), use_tqdm=False)[0].outputs[0] for value in (True, False)
    )
    assert with_text.text
    assert without.text == ""
    assert without.token_ids == with_text.token_ids
    with pytest.raises(RequestError, match=r"stop is \['x'\]; allowed: none without text"):
        SamplingParams(detokenize=False, stop="x")


def test_prompts_are_cut_to_their_end(scripted):
    llm = scripted()
    prompt = [i % 300 for i in range(llm.max_model_len + 5)]
    for cut, kept in ((3, 3), (-1, llm.max_model_len - 1), (10**9, None)):
        params = PLAIN.but(truncate_prompt_tokens=cut)
        if kept is None:
            with pytest.raises(RequestError, match="the context is"):
                llm.generate(prompt, params)
        else:
            assert llm.generate(prompt, params, use_tqdm=False)[0].prompt_token_ids == prompt[-kept:]
    assert llm.generate([1, 2], PLAIN.but(truncate_prompt_tokens=3), use_tqdm=False)[0].prompt_token_ids == [1, 2]


def test_fields_that_change_nothing():
    harmless = {"extra_args": {}, "logits_processors": [], "flat_logprobs": False, "output_kind": Kind.FINAL_ONLY}
    given = SamplingParams(**harmless, spaces_between_special_tokens=False)
    assert (given.extra_args, given.logits_processors, given.output_kind) == (None, None, "FINAL_ONLY")
    assert SamplingParams(output_kind=1).output_kind == "DELTA"


@pytest.mark.parametrize(
    ("name", "value"),
    [("detokenize", 1), ("output_kind", Kind.CUMULATIVE), ("output_kind", 0), ("output_kind", "X"),
     ("output_kind", []), ("extra_args", {"a": 1}), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", True),
     ("spaces_between_special_tokens", None), ("flat_logprobs", True), ("logits_processors", [print])],
)  # fmt: skip
def test_fields_that_cannot_be_honoured(name, value):
    with pytest.raises(RequestError, match=f"{name} is .*; allowed: ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_a_pydantic_class_is_its_schema():
    assert StructuredOutputsParams(json=City).text == StructuredOutputsParams(json=City.model_json_schema()).text

    class Odd(BaseModel, arbitrary_types_allowed=True):
        what: torch.Tensor

    for wrong in (Odd, int):
        with pytest.raises(RequestError, match=r"structured_outputs.json"):
            StructuredOutputsParams(json=wrong)
