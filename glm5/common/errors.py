"""Every error that glm5 raises on purpose.

    GlmError
        ConfigError       (ValueError)   a model or command configuration that cannot be honoured
        CheckpointError                  files that are missing, damaged or do not fit the model
        DataError                        training data that is missing, damaged or does not fit the model
        TrainingError                    a training run that cannot continue: the cause, and its progress
        RequestError      (ValueError)   a bad prompt, message or sampling parameter; `param` names it
        MissingExtra      (ImportError)  an optional dependency is not installed
        EngineDead                       the engine was closed or died; `reason` says why
        ProcessEnded                     a process of this program ended while something was asked of it
        UsageError                       a wrong command line (exit code 2)

A message states the wrong value, what is allowed and what to do, on one line. The command line prints it
as `glm5: error: ...` and ends with exit code 1, or 2 for `UsageError`.
"""

import errno

from glm5.common import open_files


class GlmError(Exception):
    """Base of all errors that a user can fix. Any other exception is a bug in glm5."""


class ConfigError(GlmError, ValueError):
    """A configuration that cannot be honoured: names the key, its value and what is allowed."""


class CheckpointError(GlmError):
    """Checkpoint files that are missing, truncated, corrupt or of the wrong shape."""


class DataError(GlmError):
    """Training data that cannot be read or used: names the file, the place in it and what is wrong there."""


class TrainingError(GlmError):
    """A training run that stopped: the cause, what is on disk, and how to resume."""


class RequestError(GlmError, ValueError):
    """A request that cannot be served. `param` is the offending field, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MissingExtra(GlmError, ImportError):
    """A feature needs a package of an extra that is not installed; the message names the pip command."""


class EngineDead(GlmError):
    """The engine was closed or died. `reason`: the cause, without the rest of the message."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine is not running: {reason}")
        self.reason = reason


class ProcessEnded(GlmError):
    """A process of this program ended, or was killed because it was silent; the message says which and why."""


class UsageError(GlmError):
    """A command line that cannot be understood or honoured."""


_BY_NAME: dict[str, type[GlmError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        CheckpointError,
        DataError,
        TrainingError,
        RequestError,
        MissingExtra,
        EngineDead,
        UsageError,
    )
}


def named(kind: str, message: str) -> GlmError:
    """Rebuild an error from another process, by the name of its class."""
    return _BY_NAME.get(kind, GlmError)(message)


_FILES = "; raise the limit of open files (ulimit -n) to 256 or more; it is {}"
_MEMORY = (
    "; out of memory: lower gpu_memory_utilization or kv_cache_memory_bytes, max_num_batched_tokens or max_num_seqs"
)


def words_of(error: BaseException) -> str:
    """An exception's message in valid Unicode: it may quote lone surrogates from JSON escapes."""
    return str(error).encode(errors="backslashreplace").decode()


def reason_of(error: BaseException) -> str:
    """Type and message of an exception, with advice if memory ran out."""
    reason = f"{type(error).__name__}: {words_of(error)}".rstrip(": ")
    return reason + _MEMORY if is_of_memory(error) else reason + advice_on_files(error)


def advice_on_files(error: BaseException) -> str:
    """What to do if this process had too many open files, to be put behind a message; else nothing."""
    is_of_files = isinstance(error, OSError) and error.errno == errno.EMFILE
    return _FILES.format(open_files.limit()) if is_of_files else ""


def is_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. Matched by name and text, because clients do not import torch."""
    by_name = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return by_name or "can't allocate memory" in str(error)
