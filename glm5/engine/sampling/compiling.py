"""Grammars compiled off the step's path: a few threads, a cache, a bound on size and one on time.

A request starts a compilation (`Compiler.compile`) and polls it (`Compilation.ready`) until there is a grammar or an
error. A hostile grammar that never finishes blocks nothing: its request is refused after `timeout_s`, other grammars
compile in other threads (`workers`), and the process can end.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isfinite
from types import ModuleType
from typing import Any
from weakref import WeakSet

from glm5.common.errors import GlmError, RequestError
from glm5.common.extras import require
from glm5.engine.sampling.params import StructuredOutputsParams
from glm5.engine.sampling.schema import refuse_unenforced, too_slow
from glm5.engine.sampling.workers import Workers

MAX_NESTING = 128
_MAX_OPERATORS = 1024  # *, +, ? and {} of an EBNF grammar: compiling takes more than as much memory as their square
_MAX_INTEGER = 2**63
_MAX_QUOTED = 4096  # characters of a string or a class in one: reading it takes their square
_OPERATOR = re.compile(r"[*+?{]")
# Also where they do not end: what is begun again and again would otherwise be read again and again.
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|#[^\n]*', re.DOTALL)
_CONTENT_OF = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}  # in a structural tag
_MAX_GRAMMARS = 1024  # in the cache
_MAX_WAITING = 256  # that are not being compiled yet
_MAX_WHITESPACE = 64  # between two JSON tokens: enough to indent, and a model cannot go on for ever
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_NO_TEXT = b"\xff"  # begins no character in UTF-8
_BOUNDED = re.compile('"(min|max)Length"')
_Key = tuple[bytes, str, str, bool]  # salt, kind, text, whether there may be whitespace


@dataclass(frozen=True)
class Vocabulary:
    """What tokens spell: `bytes_of(id)` for ids below `size`, empty for control tokens, which no grammar lets through.

    `size` is the model's, `eos_ids` are the tokens that end an answer once its grammar is complete. `is_markup`: tokens
    that parsers of the answer read as tags. A grammar that does not name such a token never allows it as text.
    """

    size: int
    eos_ids: Sequence[int]
    bytes_of: Callable[[int], bytes]
    is_markup: Callable[[int], bool] = lambda _: False


@dataclass(eq=False)
class _Job:
    """`waiters`: compilations still in use; a job without waiters is not started."""

    wanted: StructuredOutputsParams
    future: "Future[Any]" = field(default_factory=Future)
    waiters: "WeakSet[Compilation]" = field(default_factory=WeakSet)


class Compilation:
    """A grammar that is being compiled; each poll calls `refill`. To cancel it, drop the last reference."""

    def __init__(self, future: Future[Any], timeout_s: float, refill: Callable[[], None] = lambda: None) -> None:
        self._future, self._timeout_s, self._refill = future, timeout_s, refill
        self._deadline = time.monotonic() + timeout_s

    def ready(self) -> bool:
        """Whether `result` answers at once."""
        self._refill()
        return self._future.done() or time.monotonic() >= self._deadline

    def wait(self, timeout_s: float) -> None:
        """Until it is ready, at most `timeout_s`."""
        wait([self._future], timeout_s)

    def result(self) -> Any:
        """xgrammar's CompiledGrammar; waits for it. Raises RequestError, or MissingExtra without xgrammar."""
        try:
            return self._future.result(max(0.0, self._deadline - time.monotonic()))
        except TimeoutError as error:
            if self._future.running():
                raise _refusal(f"did not compile within {self._timeout_s:g} s; simplify it") from error
            raise _refusal(f"waited {self._timeout_s:g} s while others were compiled; try again later") from error


class Compiler:
    """Compiles for one vocabulary; one thread asks. Compiled grammars are kept up to `cache_bytes`, the least recently
    used go first. `slow_s`, `max_slow`: see `Workers`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        num_threads: int = 2,
        max_slow: int = 4,
        slow_s: float = 3.0,
        timeout_s: float = 60.0,
        cache_bytes: int = 1 << 28,
    ) -> None:
        self._vocabulary, self._timeout_s, self._cache_bytes = vocabulary, timeout_s, cache_bytes
        self._grammars: OrderedDict[_Key, _Job] = OrderedDict()
        self._workers: Workers[_Job] | None = None
        self._new_workers = partial(Workers[_Job], self._run, num_threads=num_threads, max_slow=max_slow, slow_s=slow_s)
        self._tokenizer_infos: dict[tuple[bool, bool], Any] = {}
        self._lock = threading.Lock()
        self._joining = threading.Lock()  # a job is either joined, or given up

    def compile(self, wanted: StructuredOutputsParams, salt: bytes = b"") -> Compilation:
        """Start compiling, or join a job of the same salt only: its duration would reveal other tenants' grammars.
        Raises RequestError while too many wait."""
        if self._workers is None:
            self._workers = self._new_workers()
        workers, key = self._workers, (salt, wanted.kind, wanted.text, wanted.disable_any_whitespace)
        job = self._grammars.get(key)
        with self._joining:
            begins = job is None or _failed(job)
            if begins and workers.num_waiting >= _MAX_WAITING:
                raise _refusal(f"cannot be compiled now, as {_MAX_WAITING} others wait for it; try again later")
            if job is None or begins:
                job = self._grammars[key] = _Job(wanted)
            compilation = Compilation(job.future, self._timeout_s, workers.refill)
            job.waiters.add(compilation)
        if begins:
            workers.put(job)
        self._grammars.move_to_end(key)
        self._evict()
        return compilation

    def close(self) -> None:
        """Ends the threads once they are done with what they have. Who compiles later starts others."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _evict(self) -> None:
        """Forget what failed, then the least recently used, down to the limits. Who holds a Compilation keeps it."""
        sizes: dict[_Key, int] = {}
        for key, job in list(self._grammars.items()):
            if _failed(job):
                del self._grammars[key]
            elif job.future.done():
                sizes[key] = len(key[2]) + job.future.result().memory_size_bytes
        total = sum(sizes.values())
        for key, size in sizes.items():
            if total <= self._cache_bytes and len(self._grammars) <= _MAX_GRAMMARS:
                break
            total -= size
            del self._grammars[key]

    def _run(self, job: _Job) -> None:
        with self._joining:
            if not job.waiters:
                job.future.cancel()
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            job.future.set_result(self._compiled(job.wanted))
        except GlmError as error:
            job.future.set_exception(error)
        except Exception as error:  # noqa: BLE001 - any error fails only this request
            job.future.set_exception(_refusal(f"is not understood: {_reason(error)}"))

    def _compiled(self, wanted: StructuredOutputsParams) -> Any:
        xgrammar = require("xgrammar", "grammar")
        escaping = wanted.kind == "json" or _BOUNDED.search(wanted.text) is not None
        with self._lock:
            key = escaping, wanted.kind == "json" or not self._spells_markup(wanted.text)
            if key not in self._tokenizer_infos:
                self._tokenizer_infos[key] = _tokenizer_info(xgrammar, self._vocabulary, *key)
        compiler = xgrammar.GrammarCompiler(self._tokenizer_infos[key], max_threads=1, cache_enabled=False)
        compiled = _compile(compiler, wanted)
        _refuse_empty(xgrammar, compiled, self._vocabulary.size, json_wanted=wanted.kind in ("json", "json_object"))
        return compiled

    def _spells_markup(self, text: str) -> bool:
        return any(spelling in text for spelling in self._markup)

    @cached_property
    def _markup(self) -> list[str]:
        ids = filter(self._vocabulary.is_markup, range(self._vocabulary.size))
        return [self._vocabulary.bytes_of(token_id).decode() for token_id in ids]


def _failed(job: _Job) -> bool:
    """Whether there is no grammar, and will be none."""
    return job.future.cancelled() or (job.future.done() and job.future.exception() is not None)


def _compile(compiler: Any, wanted: StructuredOutputsParams) -> Any:
    whitespace: dict[str, Any] = {"any_whitespace": False}
    if not wanted.disable_any_whitespace:
        whitespace = {"any_whitespace": True, "max_whitespace_cnt": _MAX_WHITESPACE}
    if wanted.kind == "json":
        refuse_unenforced(_parsed(wanted.text))
        return compiler.compile_json_schema(wanted.text, **whitespace)
    if wanted.kind == "json_object":
        return compiler.compile_json_schema('{"type": "object"}', **whitespace)
    if wanted.kind == "regex":
        _refuse_slow("regex", wanted.text)
        return compiler.compile_regex(wanted.text)
    if wanted.kind == "grammar":
        _refuse_slow("grammar", wanted.text)
        return compiler.compile_grammar(wanted.text)
    if wanted.kind == "choice":
        texts = [{"type": "const_string", "value": text} for text in json.loads(wanted.text)]
        form = {"type": "or", "elements": texts}
        return compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    for kind, content in _within_tag(_parsed(wanted.text)):
        if kind == "json_schema":
            refuse_unenforced(content)
        elif isinstance(content, str):
            _refuse_slow(kind, content)
    return compiler.compile_structural_tag(wanted.text)


def _tokenizer_info(xgrammar: ModuleType, vocabulary: Vocabulary, escaping: bool, separate_markup: bool) -> Any:
    """The vocabulary as xgrammar takes it. `escaping`: without tokens that hold a control character but line ends.
    `separate_markup`: tags are no text; structural tags can still name them by id.

    xgrammar (0.2.8) lets strings of bounded length hold tabs and other control characters, all but line ends, as they
    are. No JSON may. Without the tokens it cannot be said; the price are tabs between JSON's tokens.
    """
    if not vocabulary.eos_ids:
        raise _refusal("needs a model with an end token: nothing could follow a complete answer")
    spelled = [vocabulary.bytes_of(token_id) for token_id in range(vocabulary.size)]
    if separate_markup:
        spelled = [_NO_TEXT + spelling if vocabulary.is_markup(i) else spelling for i, spelling in enumerate(spelled)]
    if escaping:
        spelled = [b"" if _CONTROL.search(spelling) else spelling for spelling in spelled]
    return xgrammar.TokenizerInfo(
        spelled, xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.eos_ids)
    )


def _refuse_empty(xgrammar: ModuleType, compiled: Any, vocab_size: int, *, json_wanted: bool) -> None:
    """A grammar without a first token, or JSON that may be nothing: xgrammar compiles some contradictions to these."""
    matcher, mask = xgrammar.GrammarMatcher(compiled), xgrammar.allocate_token_bitmask(1, vocab_size)
    matcher.fill_next_token_bitmask(mask)
    if not mask.any() or (json_wanted and matcher.is_completed()):
        raise _refusal("matches no text")


def _parsed(text: str) -> Any:
    """JSON of bounded nesting."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"is not JSON: {error}") from error
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise _refusal(f"is nested more than {MAX_NESTING} deep")
        if any(_is_too_large(one) for one in level):
            raise _refusal("holds an integer beyond 64 bits, or a number beyond a double: no grammar has it exactly")
        level = [child for one in level for child in _within(one)]
    return value


def _is_too_large(value: Any) -> bool:
    return abs(value) >= _MAX_INTEGER if isinstance(value, int) else isinstance(value, float) and not isfinite(value)


def _within(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _within_tag(tag: Any) -> Iterator[tuple[str, Any]]:
    """(kind, content) of the schemas, regexes and grammars of a structural tag."""
    waiting = [tag]
    while waiting:
        here = waiting.pop()
        kind = here.get("type") if isinstance(here, dict) else None
        if isinstance(kind, str) and (name := _CONTENT_OF.get(kind)) in here:
            yield kind, here[name]
        else:
            waiting += _within(here)


def _refuse_slow(kind: str, text: str) -> None:
    """Raises RequestError for a regex or an EBNF grammar that could not be compiled in time, or in memory."""
    why = too_slow(text) if kind == "regex" else _too_slow_grammar(text)
    if why is not None:
        raise _refusal(why)


def _too_slow_grammar(text: str) -> str | None:
    longest = max(map(len, _QUOTED.findall(text)), default=0)
    if longest > _MAX_QUOTED:
        return f"has a text or a class of {longest} characters; allowed: {_MAX_QUOTED}"
    count = len(_OPERATOR.findall(_QUOTED.sub("", text)))
    return None if count <= _MAX_OPERATORS else f"repeats {count} parts; allowed: {_MAX_OPERATORS}"


def _reason(error: Exception) -> str:
    """xgrammar's message without clock and file. It may cut a character in two, and that is another error."""
    if isinstance(error, UnicodeDecodeError):
        return _reason(RuntimeError(error.object.decode(errors="replace")))
    said = re.sub(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*? is false: )?", "", str(error)).strip()[:300]
    return said or "its compiler does not say why"


def _refusal(why: str) -> RequestError:
    return RequestError(f"structured_outputs {why}", param="structured_outputs")
