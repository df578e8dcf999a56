"""`glm5 COMMAND ...`: finds the command's file, parses its flags, turns errors into one line and an exit code.

Exit codes: 0 done, 1 an error of files, models or requests, 2 a wrong command line, 130 Ctrl-C.
Only the command that is run is imported, and no command imports torch before its `run`.
"""

import argparse
import difflib
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence

from glm5 import __version__
from glm5.cli.flags import Parser
from glm5.common import log
from glm5.common.errors import GlmError, UsageError

# Each file has `add(subparsers)`, which adds its parser, and `run(args) -> exit code`.
COMMANDS = {
    "demo": "glm5.cli.demo",
    "serve": "glm5.cli.serve",
    "chat": "glm5.cli.chat",
    "generate": "glm5.cli.generate",
    "inspect": "glm5.cli.inspect",
    "init": "glm5.cli.init",
}
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
LOG_FORMAT_HELP = "How: lines for people, or JSON objects, one a line. Default: text."

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    _mend_streams()
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except UsageError as err:
        return _report(err, 2)
    except (GlmError, OSError) as err:
        if isinstance(err, BrokenPipeError):  # the reader of our output, such as `head`, has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _report(err, 1)
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed line; `run` in it is the command. Raises UsageError, or SystemExit after --help and --version."""
    name = argv[0] if argv else ""
    if name in COMMANDS:
        root, commands = parsers(name)
        commands[name].check_names(argv[1:])
    elif name.startswith("-"):
        root, _ = parsers(*(COMMANDS if name in ("-h", "--help") else ()))
        root.check_names([name])
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(COMMANDS)}"
        raise UsageError(f"no command {name!r}; {hint}")
    return root.parse_args(argv)


def parsers(*names: str) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line with these commands in it, and the commands' own by name."""
    root = Parser(prog="glm5", description="GLM-5: model, checkpoints, chat, server. `glm5 COMMAND --help` tells more.")
    root.add_argument("--version", action="version", version=f"glm5 {__version__}")
    subparsers = root.add_subparsers(metavar="COMMAND", dest="command", required=True, parser_class=Parser)
    commands: dict[str, Parser] = {}
    for name in names:
        module = importlib.import_module(COMMANDS[name])
        module.add(subparsers)
        commands[name] = subparsers.choices[name]
        commands[name].add_argument(
            "--log-level", choices=LOG_LEVELS, default="info", help="What to log. Default: info."
        )
        commands[name].add_argument("--log-format", choices=LOG_FORMATS, default="text", help=LOG_FORMAT_HELP)
        commands[name].set_defaults(run=module.run)
    return root, commands


def _mend_streams() -> None:
    """Streams that the caller closed lead nowhere; what standard output has no character for is written escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(argv: list[str]) -> int:
    try:
        args = parse(argv or ["--help"])
    except SystemExit as stop:  # after --help or --version; bare `glm5` shows the help and fails
        return int(stop.code or 0) if argv else 2
    log.configure(args.log_level, args.log_format)
    return args.run(args)


def _report(err: Exception, code: int) -> int:
    logger.debug("traceback", exc_info=err)
    sys.stderr.write(f"glm5: error: {err}\n")
    return code
