"""`glm5 tokenize`: texts and conversations to a token file for training."""

import argparse

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.train import TokenizeConfig


def add(parser: Parser) -> None:
    add_flags(parser, TokenizeConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(TokenizeConfig, args)
    from glm5.checkpoint.resolve import resolve
    from glm5.train.data.tokenize import Options, tokenize

    options = Options(
        str(resolve(settings.tokenizer)),
        text_key=settings.text_key,
        chat_template=settings.chat_template,
        allow_control_tokens=settings.allow_control_tokens_in_messages,
    )
    file = tokenize(settings.files, settings.out, options, settings.processes)
    learnt = "" if file.marks_T is None else f", {int(file.marks_T.sum()):,} of them learnt"
    out(f"wrote {settings.out}: {file.num_documents:,} documents, {file.num_tokens:,} tokens{learnt}")
    return 0
