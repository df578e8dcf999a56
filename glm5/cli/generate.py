"""`glm5 generate`: continue texts on the terminal, or answer them with `--chat`."""

import argparse
import importlib
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from glm5.cli.flags import add_flags, read
from glm5.cli.loading import load_llm, load_template, sampling_params
from glm5.cli.parser import Parser
from glm5.cli.screen import Screen
from glm5.common.console import out
from glm5.config.generate import GenerateConfig

if TYPE_CHECKING:
    from glm5.engine.llm import LLM


def add(parser: Parser) -> None:
    add_flags(parser, GenerateConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(GenerateConfig, args)
    if settings.chat:
        importlib.import_module("glm5.cli.chat")
    prompts = settings.prompt or (sys.stdin.read(),)
    with load_llm(settings, settings.engine_config()) as llm:
        for prompt in prompts:
            if settings.chat:
                _answer(settings, llm, prompt)
            else:
                _continue(settings, llm, prompt)
    return 0


def _continue(settings: GenerateConfig, llm: "LLM", prompt: str) -> None:
    with closing(llm.stream(prompt, sampling_params(settings, llm))) as deltas:
        for delta in deltas:
            out(delta.text, end="", flush=True)
    out()


def _answer(settings: GenerateConfig, llm: "LLM", prompt: str) -> None:
    from glm5.cli.chat import stream_answer

    template = load_template(settings, llm)
    prompt_ids = template.encode([{"role": "user", "content": prompt}], enable_thinking=settings.enable_thinking)
    screen = Screen(color=sys.stdout.isatty())
    stream_answer(llm, template, prompt_ids, sampling_params(settings, llm, skip_special_tokens=False), screen)
    screen.end()
