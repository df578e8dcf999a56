"""Which template is used, what its options may be, how a prompt becomes ids, and where the answer begins."""

import json

import pytest

from glm5.chat import BUNDLED, ChatTemplate, ends_in_reasoning
from glm5.common.errors import CheckpointError, ConfigError, RequestError
from tests.support.conversations import TOOL_LOOP, TOOLS, user

HELLO = [user("Hello")]


@pytest.fixture
def checkpoint(tokenizer, tmp_path):
    """A folder with a tokenizer and nothing else."""
    tokenizer.save(tmp_path)
    return tmp_path


def test_default_follows_the_configuration(checkpoint):
    assert ChatTemplate.for_checkpoint(checkpoint, False).name == "glm-5.1"
    assert ChatTemplate.for_checkpoint(checkpoint, True).name == "glm-5.2"
    assert ChatTemplate.for_checkpoint(None, True).name == "glm-5.2"


def test_the_checkpoints_own_comes_first(checkpoint):
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "of the list"}]
    for template, expected in [("of the settings", "of the settings"), (named, "of the list")]:
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        own = ChatTemplate.for_checkpoint(checkpoint, True)
        assert (own.name, own.render(HELLO)) == ("tokenizer_config.json", expected)
    (checkpoint / "chat_template.jinja").write_text("of the file: {{ messages[0].content }}")
    own = ChatTemplate.for_checkpoint(checkpoint, True)
    assert (own.name, own.render(HELLO)) == ("chat_template.jinja", "of the file: Hello")


def test_override_comes_before_all(checkpoint, tmp_path):
    (checkpoint / "chat_template.jinja").write_text("own")
    for name in BUNDLED:
        for spelled in (name, name.removeprefix("glm-")):
            chosen = ChatTemplate.for_checkpoint(checkpoint, True, spelled)
            assert (chosen.name, chosen.source) == (name, ChatTemplate.bundled(name).source)
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    assert ChatTemplate.for_checkpoint(checkpoint, True, str(file)).name == str(file)
    with pytest.raises(ConfigError, match=r"got 'glm-6'; allowed: glm-5, .*glm-5.3, or a file"):
        ChatTemplate.for_checkpoint(checkpoint, True, "glm-6")


def test_saved_with_a_tokenizer_it_is_the_checkpoints_own(tokenizer, tmp_path):
    tokenizer.save(tmp_path, ChatTemplate.bundled("glm-5.3").source)
    again = ChatTemplate.for_checkpoint(tmp_path)
    assert again.name == "chat_template.jinja"
    assert again.always_thinks
    assert again.render(TOOL_LOOP, TOOLS) == ChatTemplate.bundled("glm-5.3").render(TOOL_LOOP, TOOLS)


def test_broken_templates_are_named():
    with pytest.raises(CheckpointError, match=r"chat template x\.jinja, line 2: .*endif"):
        ChatTemplate("\n{% if a %}{% endfor %}", "x.jinja")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused this conversation: roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "refused this conversation: .*nothing"),
        ("{{ messages[0].content + 1 }}", "cannot render this conversation"),
        ("{{ ''.__class__.__mro__ }}", "refused this conversation: .*__class__"),
        ("{{ messages.append(1) }}", "refused this conversation: .*append"),
    ],
    ids=["raised", "undefined", "type", "internals", "mutation"],
)
def test_what_a_template_cannot_do(source, message):
    with pytest.raises(RequestError, match=message):
        ChatTemplate(source, "own").render(HELLO)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 1 / messages|length / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10**9 * messages|length) %}x{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ('x' * messages|length).ljust(10**18) }}", "MemoryError"),
        ("{{ '%s' % (10 ** (5000 * messages|length)) }}", "Exceeds the limit"),
    ],
)
def test_mistakes_of_a_template_are_the_requests(source, message):
    with pytest.raises(RequestError, match=message):
        ChatTemplate(source, "own").render(HELLO)


@pytest.mark.parametrize("source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ 10 ** 5000 }}"])
def test_templates_that_cannot_be_compiled(source):
    with pytest.raises(CheckpointError, match="chat template own cannot be compiled: "):
        ChatTemplate(source, "own")


def test_templates_that_cannot_be_read(checkpoint):
    (checkpoint / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat template \S+chat_template.jinja cannot be read: 'utf-8'"):
        ChatTemplate.for_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChatTemplate.for_checkpoint(None, override=str(checkpoint / "chat_template.jinja"))
    with pytest.raises(ConfigError, match="chat template 'glm-4': allowed: glm-5, "):
        ChatTemplate.bundled("glm-4")


def test_lists_of_templates_with_odd_entries(checkpoint):
    for entries in ([], [5], [{"name": "default"}], [{"name": "default", "template": 5}]):
        (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
        assert ChatTemplate.for_checkpoint(checkpoint).name == "glm-5.1"


def test_what_a_template_can_use(tokenizer):
    source = (
        "{{ eos_token }}|{{ {'a': '<é>'} | tojson }}|{{ [1] | tojson(indent=1) }}|{{ extra }}|"
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}|"
        "{{ strftime_now('%Y') | length }}"
    )
    rendered = ChatTemplate(source, "own", tokenizer).render(HELLO, extra="x")
    assert rendered == '<|endoftext|>|{"a": "<é>"}|[\n 1\n]|x|user|4'


@pytest.mark.parametrize(
    ("kwargs", "param", "message"),
    [
        ({"enable_thinking": "no"}, "enable_thinking", "must be true or false, got 'no'"),
        ({"clear_thinking": 1}, "clear_thinking", "must be true or false, got 1"),
        ({"thinking": "off"}, "enable_thinking", "must be true or false, got 'off'"),
        ({"reasoning_effort": 3}, "reasoning_effort", "must be text"),
    ],
)
def test_bad_options(kwargs, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate.bundled("glm-5.2").render(HELLO, **kwargs)
    assert caught.value.param == param


@pytest.mark.parametrize("kwargs", [{"enable_thinking": False}, {"thinking": False}])
def test_5_3_cannot_be_told_not_to_think(kwargs):
    template = ChatTemplate.bundled("glm-5.3")
    with pytest.raises(RequestError, match=r"glm-5\.3 always thinks; ask for less with reasoning_effort") as caught:
        template.render(HELLO, **kwargs)
    assert caught.value.param == "enable_thinking"
    assert template.starts_in_reasoning(**kwargs)
    assert template.render(HELLO, enable_thinking=True) == template.render(HELLO)


@pytest.mark.parametrize("name", BUNDLED[:3])
def test_media_are_refused_where_they_would_be_dropped(name):
    with pytest.raises(RequestError, match=r"messages\[0\].content has a part of type image_url: .*text only"):
        ChatTemplate.bundled(name).render([user([{"type": "text", "text": "x"}, {"type": "image_url"}])])


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_where_an_answer_starts(name, switch, tokenizer):
    template = ChatTemplate.bundled(name, tokenizer)
    assert template.starts_in_reasoning()
    assert template.starts_in_reasoning(**{switch: True})
    assert template.starts_in_reasoning(**{switch: False}) == (name == "glm-5.3")
    for prompt in (template.render(TOOL_LOOP), template.encode(TOOL_LOOP)):
        assert template.starts_in_reasoning(prompt)


QUESTION = "[gMASK]<sop><|system|>\nYou are a helpful assistant.<|user|>\nWhat is the capital of France?<|assistant|>\n"
ANSWER = "<think></think>\nThe capital of France is Paris.<|user|>\nWhat about Chile?<|assistant|>\n"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (QUESTION + "<think>The user is asking for the capital of", True),
        (QUESTION + "<think>The user is asking.</think>\nThe capital of France is Paris.", False),
        (QUESTION + ANSWER + "<think>The user is asking for the capital of", True),
        (QUESTION + ANSWER + "<think>The user is asking.</think>\nThe capital of Chile is Santiago.", False),
        (QUESTION, False),
        ("", False),
    ],
    ids=["still", "done", "several turns, still", "several turns, done", "no tags", "empty"],
)
def test_the_last_think_tag_decides(prompt, expected, tokenizer, bare_tokenizer):
    assert ends_in_reasoning(prompt) == expected
    assert ends_in_reasoning(tokenizer.encode(prompt), tokenizer) == expected
    assert ends_in_reasoning(bare_tokenizer.encode(prompt), bare_tokenizer) == expected


def test_spelled_think_tags_in_ids_do_not_decide(tokenizer):
    ids = tokenizer.encode("<think>") + tokenizer.encode("</think>", allow_special=False)
    assert ends_in_reasoning(ids, tokenizer)
    with pytest.raises(ValueError, match="without their tokenizer"):
        ends_in_reasoning(ids)


def test_prompts_are_encoded_with_the_templates_special_tokens(tokenizer):
    template = ChatTemplate.bundled("glm-5.1", tokenizer)
    assert template.encode(HELLO)[-2:] == [tokenizer.id_of("<|assistant|>"), tokenizer.id_of("<think>")]
    hello = [tokenizer.id_of(t) for t in ("[gMASK]", "<sop>", "<|user|>")] + tokenizer.encode("Hello")
    assert template.encode(HELLO)[:-2] == hello
    with pytest.raises(ConfigError, match="has no tokenizer"):
        ChatTemplate.bundled("glm-5.1").encode(HELLO)


def test_a_checkpoint_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json in"):
        ChatTemplate.for_checkpoint(tmp_path)
