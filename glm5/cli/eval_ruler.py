"""`glm5 eval ruler`: generated tasks at many lengths. The table goes to standard output."""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from glm5 import __version__
from glm5.cli.flags import add_flags, read
from glm5.cli.folders import check_parent
from glm5.cli.parser import Parser
from glm5.common.atomic import atomic_write
from glm5.common.console import out
from glm5.common.errors import UsageError
from glm5.config.eval import RulerConfig

if TYPE_CHECKING:
    from glm5.chat.tokenizer import Tokenizer
    from glm5.eval.ruler import Answerer


def add(parser: Parser) -> None:
    add_flags(parser, RulerConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(RulerConfig, args)
    check_parent("--json", settings.json_)
    from glm5.eval.ruler import document, evaluate, table, tasks_of

    tasks = tasks_of(settings.tasks)
    with ExitStack() as stack:
        if settings.attention == "window":
            answer, tokenizer, chosen = _by_windows(settings, tasks)
        else:
            answer, tokenizer, chosen = _by_engine(settings, stack)
        for name, choice in chosen.items():
            out(f"{name:13}  {choice}", flush=True)
        scores = list(evaluate(answer, tokenizer, tasks, settings.lengths, settings.num_samples, settings.seed))
    out("\n" + table(scores))
    if settings.json_ is not None:
        about = {
            "tool": f"glm5 {__version__} eval ruler",
            "settings": settings.model_dump(mode="json", by_alias=True, exclude_none=True),
            "choices": chosen,
        }
        with atomic_write(settings.json_) as handle:
            handle.write(json.dumps(document(scores, about), indent=1) + "\n")
    return 0


def _by_engine(settings: RulerConfig, stack: ExitStack) -> tuple["Answerer", "Tokenizer", dict[str, str]]:
    """The answering function, its tokenizer, and the resolved options. `stack` closes the engine."""
    from glm5.checkpoint.resolve import resolve
    from glm5.engine.llm import LLM
    from glm5.eval.dense import selecting
    from glm5.eval.ruler import by_engine

    engine, longest = settings.engine_config(), max(settings.lengths)
    if engine.max_model_len is None:
        engine = engine.model_copy(update={"max_model_len": longest})
    elif engine.max_model_len < longest:
        raise UsageError(f"--lengths: got {longest}; allowed: up to --max-model-len {engine.max_model_len}")
    model = resolve(settings.model)
    if settings.attention == "dense":
        model = stack.enter_context(selecting(model, longest))
    llm = stack.enter_context(LLM(model, dtype=settings.dtype, device=settings.device, **engine.model_dump()))
    chosen = {name: choice for name, choice in llm.table if name != "sampling"}
    return by_engine(llm), llm.get_tokenizer(), chosen | {"answers": "greedy"}


def _by_windows(settings: RulerConfig, tasks: Sequence[str]) -> tuple["Answerer", "Tokenizer", dict[str, str]]:
    """The same for sliding windows, which the engine does not have."""
    from glm5.chat.tokenizer import Tokenizer
    from glm5.checkpoint.load import load
    from glm5.checkpoint.resolve import resolve
    from glm5.config.step import WindowConfig
    from glm5.eval.sliding_window import by_windows, find_pattern
    from glm5.train.stage_trainer import device_of

    path = resolve(settings.model)
    tokenizer = Tokenizer.from_dir(path)
    model = load(path, settings.dtype, device_of(settings.device))
    pattern = settings.pattern
    if pattern == "search":
        pattern = find_pattern(model, tokenizer, settings.window, tasks, min(settings.lengths))
    chosen = {"window": f"{settings.window} keys", "pattern": pattern, "answers": "likeliest behind the right ones"}
    return by_windows(model, tokenizer, WindowConfig(size=settings.window, pattern=pattern)), tokenizer, chosen
