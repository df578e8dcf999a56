"""`glm5 eval ruler`: generated tasks at many lengths. The table goes to standard output."""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from glm5 import __version__
from glm5.cli.flags import add_flags, read
from glm5.common.atomic import atomic_write
from glm5.common.console import out
from glm5.common.errors import UsageError
from glm5.config.eval import RulerConfig


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ruler", help="generated tasks at many lengths, in the manner of RULER", description=RulerConfig.__doc__
    )
    add_flags(parser, RulerConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(RulerConfig, args)
    if settings.json_ is not None and not Path(settings.json_).resolve().parent.is_dir():
        raise UsageError(f"--json: there is no folder {Path(settings.json_).parent}")
    from glm5.checkpoint.resolve import resolve
    from glm5.engine.llm import LLM
    from glm5.eval.dense import selecting
    from glm5.eval.ruler import by_engine, document, evaluate, table, tasks_of

    tasks, longest = tasks_of(settings.tasks), max(settings.lengths)
    engine = settings.engine_config()
    if engine.max_model_len is None:
        engine = engine.model_copy(update={"max_model_len": longest})
    elif engine.max_model_len < longest:
        raise UsageError(f"--lengths: got {longest}; allowed: up to --max-model-len {engine.max_model_len}")
    with ExitStack() as stack:
        model = resolve(settings.model)
        if settings.attention == "dense":
            model = stack.enter_context(selecting(model, longest))
        llm = stack.enter_context(LLM(model, dtype=settings.dtype, device=settings.device, **engine.model_dump()))
        chosen = {name: choice for name, choice in llm.table if name != "sampling"} | {"answers": "greedy"}
        for name, choice in chosen.items():
            out(f"{name:13}  {choice}", flush=True)
        scores = list(
            evaluate(by_engine(llm), llm.get_tokenizer(), tasks, settings.lengths, settings.num_samples, settings.seed)
        )
        about = {
            "tool": f"glm5 {__version__} eval ruler",
            "settings": settings.model_dump(mode="json", by_alias=True, exclude_none=True),
            "engine": chosen,
        }
    out("\n" + table(scores))
    if settings.json_ is not None:
        with atomic_write(settings.json_) as handle:
            handle.write(json.dumps(document(scores, about), indent=1) + "\n")
    return 0
