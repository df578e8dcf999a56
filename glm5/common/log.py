"""Logging set-up, called by the command line only. Libraries never configure logging.

    text    12:00:00 INFO glm5.serve.http.access: POST /v1/completions 200 [4bf92f35]
    json    {"time": "...", "level": "INFO", "logger": "glm5.serve.http.access", "message": "...", "request_id": "..."}

A line carries the id of the HTTP request that caused it, where there is one, and as JSON what `extra` says too.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

Style = Literal["text", "json"]

REQUEST_ID: ContextVar[str] = ContextVar("glm5-request-id", default="")
"""The HTTP request that a task works for."""

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s"
_STANDARD = vars(logging.makeLogRecord({})).keys() | {"message", "asctime", "request"}


def configure(level: str = "info", style: Style = "text") -> None:
    """Send glm5's log lines of `level` and above to standard error, and the web server's warnings; other libraries keep
    their own ways."""
    handler = _Stderr()
    handler.addFilter(_mark)
    handler.setFormatter(_Json() if style == "json" else logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    # Not the root: huggingface_hub's own lines would come out twice.
    for name, least in (("glm5", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)


def style() -> Style:
    """How lines are written, for a process that writes beside this one."""
    handlers = logging.getLogger("glm5").handlers
    return "json" if handlers and isinstance(handlers[0].formatter, _Json) else "text"


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the moment: whoever runs a command in its own process may change it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _mark(record: logging.LogRecord) -> bool:
    request_id = REQUEST_ID.get()
    record.request = f" [{request_id}]" if request_id else ""
    return True


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            fields["request_id"] = request_id
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
