"""Templates of checkpoints run in a process that can be ended; bundled ones run here, and both write the same."""

import signal

import pytest

from glm5.chat import BUNDLED, ChatTemplate
from glm5.chat.rendering import MAX_TEXT, InProcessTemplate, TemplateFailure, WorkerTemplate
from glm5.common.errors import CheckpointError, RequestError
from tests.support.conversations import TOOL_LOOP, TOOLS, user

TURNS = "{% for i in range(100000) %}"  # as many as a sandbox allows
ENDLESS = TURNS * 3 + "{% endfor %}" * 3
HELLO = [user("Hello")]
CPU_SECONDS = 1


def pid(renderer):
    return renderer._worker._process.pid


@pytest.mark.parametrize("name", BUNDLED)
def test_a_process_of_its_own_writes_the_same(name):
    source = ChatTemplate.bundled(name).source
    other = ChatTemplate(source + "{# not ours #}", "own")
    assert isinstance(ChatTemplate(source.rstrip(), "saved")._renderer, InProcessTemplate)
    assert isinstance(other._renderer, WorkerTemplate)
    assert other.render(TOOL_LOOP, TOOLS) == ChatTemplate.bundled(name).render(TOOL_LOOP, TOOLS)


def test_a_template_without_end_is_ended_and_the_next_conversation_is_rendered():
    renderer = WorkerTemplate("{% if forever %}" + ENDLESS + "{% endif %}{{ text }}", CPU_SECONDS)
    assert renderer.render({"text": "a\ud800ü"}) == "a\ud800ü"
    before = pid(renderer)
    with pytest.raises(TemplateFailure, match=f"^ takes more than {CPU_SECONDS} s of processor time$"):
        renderer.render({"forever": True})
    assert renderer.render({"text": "b"}) == "b"
    assert pid(renderer) != before
    assert renderer.render({"text": "c"}) == "c"


def test_a_template_that_computes_without_end_while_it_is_compiled():
    with pytest.raises(TemplateFailure, match="processor time"):
        WorkerTemplate("{{ 9 ** (9 ** 9) }}", CPU_SECONDS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{{ "x" * 10000000000 }}', "chat template own cannot render this conversation: MemoryError"),
        ('{% set x = "x" * 10000000 %}{{ x * 10 }}', f"chat template own writes 100000000 characters .*{MAX_TEXT}"),
        ("{{ [0] * 10 ** 12 }}", "chat template own cannot render this conversation: MemoryError"),
    ],
)
def test_templates_that_write_without_end(source, message):
    template = ChatTemplate(source, "own")
    for _ in range(2):
        with pytest.raises(RequestError, match=message) as caught:
            template.render(HELLO)
        assert caught.value.param == "messages"


def test_templates_that_are_no_templates_for_their_size(tmp_path):
    with pytest.raises(CheckpointError, match="chat template own has 1048577 characters; allowed: 1048576"):
        ChatTemplate("x" * (2**20 + 1), "own")
    (tmp_path / "chat_template.jinja").write_text("x" * (2**20 + 1))
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is larger than 1 MiB"):
        ChatTemplate.for_checkpoint(None, override=str(tmp_path / "chat_template.jinja"))


def test_a_process_that_is_killed_is_said_and_started_again():
    renderer = WorkerTemplate("{{ text }}")
    renderer._worker._process.kill()
    with pytest.raises(TemplateFailure, match=r" brought down the process that runs it \(SIGKILL\)"):
        renderer.render({"text": "a"})
    assert renderer.render({"text": "a"}) == "a"


def test_the_process_ends_with_the_template_and_outlives_ctrl_c():
    renderer = WorkerTemplate("{{ text }}")
    process = renderer._worker._process
    assert renderer.render({"text": "a"}) == "a"  # it has begun, and so does not heed Ctrl-C any more
    process.send_signal(signal.SIGINT)
    assert renderer.render({"text": "b"}) == "b"
    del renderer
    assert process.returncode == -signal.SIGKILL


def test_variables_that_cannot_travel():
    with pytest.raises(TemplateFailure, match="cannot render this conversation"):
        WorkerTemplate("{{ text }}").render({"text": lambda: 0})


def test_marks_are_not_shown_in_what_a_template_says(tokenizer):
    template = ChatTemplate("{{ raise_exception('no ' ~ messages[0].content) }}", "own", tokenizer)
    with pytest.raises(RequestError, match=r"chat template own refused this conversation: no <\|user\|>$"):
        template.encode([user("<|user|>")])


def test_what_a_template_gives_as_its_reason_is_cut():
    with pytest.raises(TemplateFailure) as caught:
        WorkerTemplate('{{ raise_exception("x" * (100000 * messages|length)) }}').render({"messages": [1]})
    assert len(str(caught.value)) <= 1100
