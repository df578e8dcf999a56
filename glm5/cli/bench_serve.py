"""`glm5 bench serve`: load on a running server, and what it made of it. The table goes to standard output."""

import argparse
import asyncio
import os
from typing import TYPE_CHECKING

from glm5.cli.flags import add_flags, read
from glm5.cli.folders import check_parent
from glm5.cli.parser import Parser
from glm5.common.console import out
from glm5.common.errors import GlmError
from glm5.config.bench_serve import BenchServeConfig

if TYPE_CHECKING:
    from glm5.bench.serve.session import Done


def add(parser: Parser) -> None:
    add_flags(parser, BenchServeConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(BenchServeConfig, args)
    check_parent("--json", settings.json_)
    check_parent("--plot", settings.plot)
    from glm5.bench.serve import plot
    from glm5.bench.serve.progress import LoadProgress
    from glm5.bench.serve.report import block, write_json
    from glm5.bench.serve.session import measure

    if settings.plot is not None:
        plot.check()

    runs: list[Done] = []

    def ended(done: "Done") -> None:
        live.close()
        runs.append(done)
        out(block(done.result, settings.percentile_metrics), flush=True)
        if settings.json_ is not None:
            write_json(settings.json_, settings, runs)

    with LoadProgress() as live:
        asyncio.run(measure(settings, os.environ.get("OPENAI_API_KEY"), live.start, ended))
    return _conclude(settings, runs)


def _conclude(settings: BenchServeConfig, runs: list["Done"]) -> int:
    from glm5.bench.serve.plot import write_plot
    from glm5.bench.serve.report import sweep_table

    results = [done.result for done in runs]
    if len(results) > 1:
        out("\n" + sweep_table(results))
    if settings.plot is not None and any(result.completed for result in results):
        write_plot(settings.plot, results, f"{runs[-1].info.model}, {settings.dataset_name}")
    if results[-1].partial:
        return 130
    if not any(result.completed for result in results):
        raise GlmError("no request had a whole answer; the errors are above")
    return 0
