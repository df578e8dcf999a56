"""The same files in transformers: same ids, same text, same prompts."""

import itertools

import pytest

from glm5.chat import BUNDLED, ChatTemplate, Tokenizer, normalize_messages
from glm5.chat.special import CONTROL_TOKENS, GLM_TOKENS
from tests.support.conversations import ALL, KWARGS, OUTPUTS, TOOLS

STRINGS = [
    "",
    "Hello world 1234",
    "[gMASK]<sop><|user|>hi<|assistant|><think>x</think>y<tool_call>f</tool_call>",
    "你好世界 🎉 Zoë e\u0301 \x00\x7f\u200b",
    "  two  spaces\n\n\ttabs\r\n",
    "<|user|><|us er|></think ></nothink/nothink",
]


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(path, ChatTemplate.bundled("glm-5.2").source)
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_settings_arrive(theirs, tokenizer):
    assert (theirs.eos_token, theirs.pad_token) == ("<|endoftext|>", "<|endoftext|>")
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.pad_id
    assert set(theirs.all_special_tokens) == set(CONTROL_TOKENS)
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.padding_side == "left"
    assert theirs.chat_template.rstrip() == ChatTemplate.bundled("glm-5.2").source.rstrip()
    assert theirs.convert_tokens_to_ids(list(GLM_TOKENS)) == [tokenizer.id_of(token) for token in GLM_TOKENS]


@pytest.mark.parametrize("text", STRINGS)
def test_same_ids_and_text(theirs, tokenizer, text):
    ids = theirs.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == theirs.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=True) == theirs.decode(ids, skip_special_tokens=True)


def test_a_tokenizer_that_transformers_saved(theirs, tokenizer, tmp_path):
    theirs.save_pretrained(tmp_path)
    again = Tokenizer.from_dir(tmp_path)
    assert [again.encode(text) for text in STRINGS] == [tokenizer.encode(text) for text in STRINGS]
    assert (again.eos_ids, again.pad_id) == (tokenizer.eos_ids, tokenizer.pad_id)
    assert ChatTemplate.for_checkpoint(tmp_path).name == "chat_template.jinja"


@pytest.mark.parametrize("name", BUNDLED)
def test_same_prompts(theirs, tokenizer, name):
    template = ChatTemplate.bundled(name, tokenizer)
    checked = 0
    conversations = [*ALL.values(), *([OUTPUTS] if name in ("glm-5", "glm-5.3") else [])]
    for messages, kwargs, tools in itertools.product(conversations, KWARGS, (None, TOOLS)):
        if template.always_thinks and kwargs.get("enable_thinking") is False:
            continue
        for ask in (True, False):
            ours = template.render(messages, tools, add_generation_prompt=ask, **kwargs)
            arguments = {"chat_template": template.source, "tools": tools, "add_generation_prompt": ask, **kwargs}
            as_they_are = theirs.apply_chat_template(messages, tokenize=False, **arguments)
            normalized = theirs.apply_chat_template(normalize_messages(messages), tokenize=False, **arguments)
            assert ours == as_they_are == normalized
            checked += 1
    assert checked > 200
    ids = theirs.apply_chat_template(ALL["tool loop"], chat_template=template.source, tools=TOOLS, return_dict=False,
                                     add_generation_prompt=True)  # fmt: skip
    assert template.encode(ALL["tool loop"], TOOLS) == ids
