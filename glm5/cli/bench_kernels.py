"""`glm5 bench kernels`: microseconds of each kernel beside its floor on this GPU. The table goes to standard output."""

import argparse
from pathlib import Path

from glm5.cli.flags import add_flags, read
from glm5.cli.folders import check_parent
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.common.errors import UsageError
from glm5.config.bench_kernels import BenchKernelsConfig


def add(parser: Parser) -> None:
    add_flags(parser, BenchKernelsConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(BenchKernelsConfig, args)
    check_parent("--json", settings.json_)
    check_parent("--tuned", settings.tuned)
    if settings.tuned is not None and not settings.tune:
        raise UsageError("--tuned says where --tune writes; add --tune")
    from glm5.bench.command import need_gpus

    need_gpus("glm5 bench kernels")
    from glm5.bench.kernels import every_case, table, tune

    if settings.tune:
        out(f"written to {tune.tune(settings.only, Path(settings.tuned) if settings.tuned else None)}")
        return 0
    return table.report(every_case(), settings.only, Path(settings.json_) if settings.json_ else None)
