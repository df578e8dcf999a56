"""`glm5 chat`: a conversation in the terminal. The answer streams, with the model's reasoning shown separately."""

import argparse
import importlib
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from glm5.chat.parser import OutputParser
from glm5.cli.flags import add_flags, read
from glm5.cli.loading import load_llm, load_template, resolved, sampling_params
from glm5.cli.parser import Parser
from glm5.cli.screen import Screen
from glm5.common.console import out
from glm5.common.errors import RequestError
from glm5.config.generate import ChatConfig

if TYPE_CHECKING:
    from glm5.chat.template import ChatTemplate
    from glm5.engine.llm import LLM
    from glm5.engine.sampling.params import SamplingParams

HELP = """/help          this list
/reset         forget the conversation
/think on|off  let the model think before it answers, or not
/exit          leave (also Ctrl-D)
Ctrl-C stops an answer; the part so far stays in the conversation."""


def add(parser: Parser) -> None:
    add_flags(parser, ChatConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(ChatConfig, args)
    with load_llm(settings, settings.engine_config()) as llm:
        template = load_template(settings, llm)
        for line in resolved(settings, llm, template):
            out(line)
        out("/help lists the commands")
        Conversation(llm, template, settings).run()
    return 0


def stream_answer(
    llm: "LLM", template: "ChatTemplate", prompt_ids: list[int], params: "SamplingParams", screen: Screen
) -> None:
    """Show the answer to a prompt while it is generated."""
    reasoning = template.starts_in_reasoning(prompt_ids)
    parser = OutputParser(llm.tokenizer, reasoning=reasoning, parse_tools=False)
    with closing(llm.stream(prompt_ids, params)) as deltas:
        for delta in deltas:
            for piece in delta.pieces:
                screen.show(parser.feed(piece.token_id, piece.text))
    screen.show(parser.finish())


class Conversation:
    """The messages so far, and the commands of the user."""

    def __init__(self, llm: "LLM", template: "ChatTemplate", settings: ChatConfig):
        self.llm, self.template, self.settings = llm, template, settings
        self.thinks = settings.enable_thinking
        self.on_terminal = sys.stdin.isatty()
        self.messages: list[dict[str, str]] = []
        self._reset()

    def run(self) -> None:
        """Read and answer until the end of the input."""
        if self.on_terminal:
            importlib.import_module("readline")  # line editing and history for input()
        while True:
            try:
                line = input("> " if self.on_terminal else "").strip()
            except EOFError:
                out()
                return
            except KeyboardInterrupt:  # discard the current line
                out()
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line.split())
            elif line:
                self._ask(line)

    def _command(self, words: list[str]) -> None:
        match words:
            case ["/help"]:
                out(HELP)
            case ["/reset"]:
                self._reset()
                out("the conversation is forgotten")
            case ["/think", ("on" | "off") as choice]:
                self.thinks = choice == "on"
                out(f"thinking is {choice}")
            case _:
                out(f"no command {' '.join(words)}; there are\n{HELP}")

    def _reset(self) -> None:
        system = self.settings.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def _ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        screen = Screen(color=sys.stdout.isatty())
        try:
            prompt_ids = self.template.encode(self.messages, enable_thinking=self.thinks)
            params = sampling_params(self.settings, self.llm, skip_special_tokens=False)
            stream_answer(self.llm, self.template, prompt_ids, params, screen)
        except RequestError as error:
            self.messages.pop()
            out(f"{error} (/reset starts anew)")
            return
        except KeyboardInterrupt:
            out(" (stopped)", end="")
        self.messages.append(screen.end())
