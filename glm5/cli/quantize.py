"""`glm5 quantize`: a checkpoint to a quantized one, layer by layer."""

import argparse
import json

from glm5.cli.flags import add_flags, read
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.config.quantize import QuantizeConfig


def add(parser: Parser) -> None:
    add_flags(parser, QuantizeConfig)


def run(args: argparse.Namespace) -> int:
    return execute(read(QuantizeConfig, args))


def execute(settings: QuantizeConfig) -> int:
    """Run the quantization or analysis, and print its result."""
    if settings.analyze:
        from glm5.quantize.analyze import analyze, as_text

        path = analyze(settings)
        out(as_text(json.loads((path / "analysis.json").read_text(encoding="utf-8"))))
        out(f"wrote {path}; quantize with  --recipe {path / 'recipe.toml'}")
        return 0
    from glm5.quantize.run import quantize

    path = quantize(settings)
    out(f"wrote {path}")
    return 0
