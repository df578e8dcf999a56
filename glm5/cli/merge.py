"""`glm5 merge`: a checkpoint and an adapter to a checkpoint."""

import argparse
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.files import MergeConfig


def add(parser: Parser) -> None:
    add_flags(parser, MergeConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(MergeConfig, args)
    from glm5.checkpoint.adapters import merge
    from glm5.checkpoint.load import load
    from glm5.checkpoint.resolve import resolve
    from glm5.checkpoint.save import check_unwritten, save
    from glm5.common.errors import CheckpointError
    from glm5.model.experts import QuantizedExperts
    from glm5.model.linear import QuantizedLinear

    if not settings.overwrite:
        check_unwritten(Path(settings.out))
    source = resolve(settings.model)
    model = load(source)
    if any(isinstance(part, QuantizedLinear | QuantizedExperts) for part in model.modules()):
        raise CheckpointError(
            f"{settings.model}: holds integer codes, which cannot be written with an adapter merged; merge into the "
            "bfloat16 checkpoint that it was made of, and quantize the result, or serve it as it is: "
            f"glm5 serve {settings.model} --adapter {settings.adapter}"
        )
    count = merge(model, settings.adapter)
    out(f"wrote {save(model, Path(settings.out), assets=source)}: {count} matrices changed")
    return 0
