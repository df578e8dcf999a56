"""`glm5 merge`: a checkpoint and an adapter to a checkpoint."""

import argparse
from pathlib import Path
from typing import Any

from glm5.cli.flags import add_flags, read
from glm5.common.console import out
from glm5.config.files import MergeConfig


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "merge", help="merge a LoRA adapter into a checkpoint", description=MergeConfig.__doc__
    )
    add_flags(parser, MergeConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(MergeConfig, args)
    from glm5.checkpoint.adapters import merge
    from glm5.checkpoint.load import load
    from glm5.checkpoint.resolve import resolve
    from glm5.checkpoint.save import save

    source = resolve(settings.model)
    model = load(source)
    count = merge(model, settings.adapter)
    out(f"wrote {save(model, Path(settings.out), assets=source)}: {count} matrices changed")
    return 0
