"""`glm5 generate` and `glm5 chat`: what comes on the terminal."""

import builtins
import io
import sys
from functools import partial

import pytest

from glm5.chat.events import ContentDelta, ReasoningDelta
from glm5.chat.template import ChatTemplate
from glm5.cli.main import main
from glm5.cli.screen import Screen
from glm5.engine.frontend.outputs import Delta, Piece
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from tests.support.cores import scripted_start

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--device", "cpu"]


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, device="cpu")


def test_generate_continues_each_text(checkpoint, llm, capsys):
    params = SamplingParams(temperature=0, max_tokens=12)
    want = [out.outputs[0].text for out in llm.generate(["one", "the two"], params, use_tqdm=False)]
    capsys.readouterr()
    assert main(["generate", checkpoint, "--prompt", "one", "the two", *GREEDY]) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in want)


def test_generate_reads_standard_input(checkpoint, llm, capsys, monkeypatch):
    (want,) = llm.generate("from a pipe", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert main(["generate", checkpoint, *GREEDY]) == 0
    assert capsys.readouterr().out == want.outputs[0].text + "\n"


def test_generate_chat_answers_through_the_template(checkpoint, monkeypatch, capsys):
    prompts = script(monkeypatch, "I think</think>the answer")
    assert main(["generate", checkpoint, "--chat", "--prompt", "hello", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "<think>I think</think>\nthe answer\n"
    assert prompts[0].endswith("<|user|>hello<|assistant|><think>")


def test_generate_chat_without_thinking(checkpoint, monkeypatch):
    prompts = script(monkeypatch, "the answer")
    assert main(["generate", checkpoint, "--chat", "--no-enable-thinking", "--prompt", "hello", "--device", "cpu"]) == 0
    assert prompts[0].endswith("<|assistant|><think></think>")


def script(monkeypatch, *answers) -> list[str]:
    """Let LLM.stream say these, one after another; the prompts it gets are appended to the returned list.

    Where an answer has a ^C, Ctrl-C is pressed.
    """
    prompts, answers = [], list(answers)
    monkeypatch.setattr("glm5.engine.llm.Start", partial(scripted_start, "ok"))  # whose model is never asked

    def stream(self, prompt_ids, params):
        prompts.append(self.tokenizer.decode(prompt_ids))
        assert not params.skip_special_tokens
        text, interrupt, _ = answers.pop(0).partition("^C")
        for token_id in self.tokenizer.encode(text):
            yield Delta((token_id,), (Piece(token_id, self.tokenizer.decode([token_id])),))
        if interrupt:
            raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", stream)
    return prompts


@pytest.fixture
def talk(checkpoint, monkeypatch, capsys):
    """Run `glm5 chat` with these lines typed (^C: Ctrl-C at the prompt); returns what it wrote."""

    def run(*lines, flags=()):
        typed = iter(lines)

        def read(prompt):
            line = next(typed, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr(builtins, "input", read)
        argv = ["chat", checkpoint, "--device", "cpu", "--chat-template", "5.1", *flags]
        assert main(argv) == 0
        return capsys.readouterr().out.split("lists the commands\n")[1]

    return run


def test_a_conversation(talk, monkeypatch):
    prompts = script(monkeypatch, "hm</think>hello", "</think>bye")
    assert talk("hi", "", "^C", "and now?") == "<think>hm</think>\nhello\n\nbye\n\n"
    assert prompts[0] == "[gMASK]<sop><|user|>hi<|assistant|><think>"
    assert prompts[1].endswith("<|user|>hi<|assistant|></think>hello<|user|>and now?<|assistant|><think>")


def test_commands(talk, monkeypatch):
    prompts = script(monkeypatch, "hello", "</think>x")
    text = talk("/think off", "hi", "/reset", "/think on", "again", "/thonk", "/help", "/exit", "not read",
                flags=["--system", "be brief"])  # fmt: skip
    assert text.startswith("thinking is off\nhello\nthe conversation is forgotten\nthinking is on\nx\n")
    assert "no command /thonk; there are\n/help" in text
    assert prompts[0].endswith("<|system|>be brief<|user|>hi<|assistant|></think>")
    assert prompts[1].endswith("<|system|>be brief<|user|>again<|assistant|><think>")


def test_ctrl_c_stops_an_answer_and_keeps_it(talk, monkeypatch):
    prompts = script(monkeypatch, "</think>half an ans^C", "</think>fine")
    assert talk("hi", "go on").startswith("half an ans (stopped)\nfine\n")
    assert "</think>half an ans<|user|>go on" in prompts[1]


def test_a_conversation_that_outgrows_the_context(talk):
    text = talk("x" * 80, "/reset", "y", flags=["--max-model-len", "64", "--temperature", "0"])
    assert "the context is 64 and must hold at least one more" in text
    assert "(/reset starts anew)\nthe conversation is forgotten\n" in text


def test_thinking_is_dim_on_a_terminal(capsys):
    screen = Screen(color=True)
    screen.show([ReasoningDelta("a"), ReasoningDelta("b"), ContentDelta("c"), ContentDelta("d")])
    assert screen.end() == {"role": "assistant", "content": "cd", "reasoning_content": "ab"}
    assert capsys.readouterr().out == "\x1b[2mab\x1b[0m\n\ncd\n"
    screen = Screen(color=True)
    screen.show([ReasoningDelta("a")])
    screen.end()
    assert capsys.readouterr().out == "\x1b[2ma\x1b[0m\n\n\n"


def test_a_template_that_always_thinks_says_so(talk, monkeypatch):
    script(monkeypatch)
    assert ChatTemplate.bundled("glm-5.3").always_thinks
    assert "always thinks" in talk("/think off", "hi", flags=["--chat-template", "5.3"])
