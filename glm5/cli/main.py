"""`glm5 COMMAND ...`: finds the command's file, parses its flags, turns errors into one line and an exit code.

Exit codes: 0 done, 1 an error of files, models or requests, 2 a wrong command line, flags that the model or the machine
does not allow among them, 130 Ctrl-C, 143 a request to end (SIGTERM).
Only the command that is run is imported, for `glm5 --help` none; and no command imports torch before its `run`.
"""

import argparse
import difflib
import importlib
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from glm5 import __version__
from glm5.cli.parser import Parser
from glm5.common import log
from glm5.common.errors import ConfigError, GlmError, UsageError, advice_on_files
from glm5.common.interrupt import held_interrupt, orderly_end

# What a command does, in the words of `glm5 --help`. Its file, `bench_all.py` for "bench all", has `add(parser)`, which
# adds its flags, and `run(args) -> exit code`. Of two words, the first is a group of commands, or a command itself.
# Three are one command.
COMMANDS = {
    "demo": "train a small GLM-5, serve it and ask it",
    "serve": "serve a model over HTTP",
    "key": "make an API key",
    "chat": "talk with a model in the terminal",
    "generate": "continue texts on the terminal",
    "inspect": "what a checkpoint holds, and whether it loads",
    "init": "write a random checkpoint",
    "quantize": "quantize a checkpoint, layer by layer",
    "quant": "the same with msModelSlim's command line",
    "convert": "convert a checkpoint between FP8 and BF16",
    "merge": "merge a LoRA adapter into a checkpoint",
    "tokenize": "write a token file for training",
    "train": "train as a recipe says",
    "rl": "reinforcement learning as a recipe says",
    "rl view": "a run's rollouts, token by token, and its curves",
    "rl filter": "find the tasks of a recipe that are neither too easy nor too hard",
    "rl export": "a run's best conversations, for supervised fine-tuning",
    "rl replay": "redo a training step of a run, to the same bits",
    "post-train": "all stages of post-training, up to a served W4A8 model",
    "env make swe": "tasks of software engineering, from packages with tests",
    "env make terminal": "generated terminal tasks, as folders in Harbor's format",
    "env check": "whether the rewards of an environment's tasks can be trusted",
    "env serve": "an environment for clients of OpenEnv",
    "bench all": "everything about a model on this machine, part by part",
    "bench throughput": "tokens a second of requests that come at once",
    "bench latency": "times of requests that come one by one",
    "bench serve": "load on a running server: throughput and latency",
    "bench frontend": "the server without a model: chunks a second and core",
    "bench kernels": "kernels on this GPU: microseconds, floor, share",
    "bench quantize": "methods of quantization side by side",
    "bench rl": "reinforcement learning: rollouts, training, time to a reward",
    "bench off-policy": "reinforcement learning on rollouts of old weights, by algorithm and staleness",
    "bench hybrid": "reinforcement learning by rules, a reward model and human anchors, alone and together",
    "bench transition": "dense attention to selected keys in miniature, beside windows",
    "report": "claims of the GLM-5 report, re-tested small",
    "eval ruler": "generated tasks at many lengths, in the manner of RULER",
}
GROUPS = {
    "bench": "measure throughput, latency, servers, kernels and quantization",
    "env": "make and check tasks for reinforcement learning",
    "eval": "what a model can do, on generated tasks",
}
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
LOG_FORMAT_HELP = "How: lines for people, or JSON objects, one a line. Default: text."

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    _repair_streams()
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except UsageError as err:
        return _report(err, 2)
    except (GlmError, OSError) as err:
        if isinstance(err, BrokenPipeError):  # the reader of our output, such as `head`, has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _report(err, 1)
    except (MemoryError, RuntimeError) as err:
        if not _is_of_memory(err):
            raise
        short = str(err).partition("\n")[0][:200]
        return _report(GlmError(f"out of memory: {short}; a smaller model, batch or length needs less"), 1)
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed line; `run` in it is the command, `flags` are all that it has. Raises UsageError, or SystemExit after
    --help and --version."""
    name = argv[0] if argv else ""
    command: Parser | None = None
    own = argv[1] if len(argv) > 1 else ""
    if (three := " ".join(argv[:3])) in COMMANDS and len(argv) > 2:
        root, commands = parsers(three)
        command = commands[three]
        command.check_names(argv[3:])
        argv = [name, three.removeprefix(f"{name} "), *argv[3:]]
    elif f"{name} {own}" in COMMANDS:
        root, commands = parsers(f"{name} {own}")
        command = commands[f"{name} {own}"]
        command.check_names(argv[2:])
        if name not in GROUPS:
            argv = [f"{name} {own}", *argv[2:]]
    elif name in GROUPS and own not in ("-h", "--help"):
        of_group = [command.partition(" ")[2] for command in COMMANDS if command.split()[0] == name]
        raise UsageError(_unknown(own, of_group, f"{name} "))
    elif name in COMMANDS:
        root, commands = parsers(name)
        command = commands[name]
        command.check_names(argv[1:])
    elif name in GROUPS or name.startswith("-"):
        root, _ = parsers()
        root.check_names([name])
    else:
        raise UsageError(_unknown(name, list(dict.fromkeys(command.split()[0] for command in COMMANDS))))
    args, words = root.parse_known_args(argv)
    if words:
        (command or root).refuse_words(words)
    return args


def parsers(*names: str) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and those of these commands by name: they alone are imported and have flags."""
    root = Parser(prog="glm5", description="GLM-5: model, checkpoints, chat, server. `glm5 COMMAND --help` tells more.")
    root.add_argument("--version", action="version", version=f"glm5 {__version__}")
    holders: dict[str, Any] = {"": root.add_subparsers(metavar="COMMAND", dest="command", required=True)}
    commands: dict[str, Parser] = {}
    for name, text in COMMANDS.items():
        group, _, own = name.partition(" ")
        if group not in GROUPS:
            group, own = "", name
        elif group not in holders:
            holders[group] = _add_group(holders[""], group)
        commands[name] = holders[group].add_parser(own, help=text)
    for name in names:
        module, command = importlib.import_module(f"glm5.cli.{re.sub('[ -]', '_', name)}"), commands[name]
        module.add(command)
        command.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="What to log. Default: info.")
        command.add_argument("--log-format", choices=LOG_FORMATS, default="text", help=LOG_FORMAT_HELP)
        command.set_defaults(run=module.run, flags=command.flags())
    return root, {name: commands[name] for name in names}


def _add_group(subparsers: Any, name: str) -> Any:
    text = GROUPS[name]
    parser = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    return parser.add_subparsers(metavar="WHAT", dest="what", required=True)


def _unknown(name: str, allowed: list[str], group: str = "") -> str:
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {group}{near[0]}?" if near else f"allowed: {', '.join(allowed)}"
    return f"no command {group + name!r}; {hint}" if name else f"{group}needs one more word; {hint}"


def _repair_streams() -> None:
    """Replace closed standard streams by /dev/null; escape characters that standard output cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(argv: list[str]) -> int:
    try:
        with held_interrupt():  # some modules catch every exception at import, also that of a signal
            args = parse(argv or ["--help"])
    except SystemExit as stop:  # after --help or --version; bare `glm5` shows the help and fails
        return int(stop.code or 0) if argv else 2
    log.configure(args.log_level, args.log_format)
    try:
        os.getcwd()
    except OSError:  # libraries would fail with unclear errors
        raise GlmError("the folder in which this was started is gone; cd to one that exists") from None
    try:
        with orderly_end():
            return args.run(args)
    except ConfigError as err:
        from glm5.cli.flags import with_flag_name

        raise with_flag_name(err, args.flags) from err


def _is_of_memory(err: MemoryError | RuntimeError) -> bool:
    """Whether host or GPU memory ran out; matched by name, because torch may not be imported here."""
    kinds = {kind.__name__ for kind in type(err).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(err)


def _report(err: Exception, code: int) -> int:
    logger.debug("traceback", exc_info=err)
    sys.stderr.write(f"glm5: error: {err}{advice_on_files(err)}\n")
    return code
