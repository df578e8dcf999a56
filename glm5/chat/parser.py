"""Streaming parser of answers: splits them into reasoning, text and tool calls, with one state machine.

    answer   = [<think>] reasoning </think> (text | call)*
    call     = <tool_call> name (<arg_key> key </arg_key> <arg_value> value </arg_value>)* </tool_call>

White space around names, keys and pairs is ignored (GLM-4.5 puts line breaks there); values are kept as
they are. A tag is a special token. Text that spells a tag is text, unless the tokenizer lacks that token.
A tag in a place where the grammar does not allow it is text, too.

Events are final. Splitting the same answer into other pieces changes only where deltas are divided. Each
character is processed once.
"""

import logging
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from glm5.chat.arguments import Arguments, dump
from glm5.chat.events import (
    ContentDelta,
    Event,
    Parsed,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from glm5.chat.message import normalize_tools
from glm5.chat.schema import reading_budget
from glm5.chat.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TAGS = (THINK, THINK_END, CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
_LONGEST_TAG = max(map(len, TAGS))


class HasTokens(Protocol):
    """The part of a tokenizer that the parser needs: the id of a tag's token, or None."""

    def id_of(self, token: str, /) -> int | None: ...


class _At(Enum):
    """The states of the parser."""

    START = auto()
    REASONING = auto()
    CONTENT = auto()
    NAME = auto()
    PAIRS = auto()
    KEY = auto()
    AFTER_KEY = auto()
    VALUE = auto()


@dataclass
class _Call:
    """The current tool call."""

    index: int
    arguments: Arguments
    is_open: bool = False
    num_pairs: int = 0
    pairs: list[tuple[str, str]] = field(default_factory=list)


class Functions(dict[str, Arguments]):
    """The functions that may be called, by name, with their schemas analysed once for any number of parsers. Raises
    RequestError for tools whose schemas exceed the budget."""

    def __init__(self, tools: Any) -> None:
        budget = reading_budget()
        for tool in normalize_tools(tools) or []:
            function = tool["function"]
            name = function["name"]
            self[name] = Arguments(function.get("parameters"), f"the parameters of {name!r:.60}", budget)


_ANY = Arguments(None)  # of a function that is not known

_Moves = dict[tuple[_At, str], Callable[["OutputParser"], None]]


class _Grammar(NamedTuple):
    """The transition table: the action of each tag in each state that allows it. The tags that are tokens; of each
    state those that are not, so that text may spell them, and an expression that finds them."""

    moves: _Moves
    tag_of_id: dict[int, str]
    spelled: dict[_At, list[str]]
    spelling: dict[_At, re.Pattern[str] | None]


class OutputParser:
    """Parses one answer. Feed it the tokens in order, then call `finish`; `collect` joins the events.

    `reasoning`: the answer begins inside reasoning (`ChatTemplate.starts_in_reasoning`); otherwise all
    of it is content. `parse_tools`: parse tool calls; otherwise their tags are text. `tools`: the tools of a request,
    or `Functions`. `only_offered`: a call of another function is text; otherwise it is a call, too.
    """

    def __init__(
        self,
        tokenizer: HasTokens | None,
        tools: Any = None,
        *,
        reasoning: bool,
        parse_tools: bool = True,
        only_offered: bool = False,
    ) -> None:
        self._functions = tools if isinstance(tools, Functions) else Functions(tools)
        self._only_offered = only_offered
        ids = tuple([tokenizer.id_of(tag) if tokenizer else None for tag in TAGS])
        grammar = self._grammar(ids, reasoning=reasoning, parse_tools=parse_tools)
        self._moves, self._tag_of_id, self._spelled, self._spelling = grammar
        self._spells_in_content = bool(self._spelled[_At.CONTENT])
        self._spells_in_reasoning = bool(self._spelled[_At.REASONING])
        self._at = _At.START if reasoning else _At.CONTENT
        self._tail = ""  # end of the text that may be the beginning of a spelled tag
        self._blank: list[str] | None = []  # white space before the first content; None after that
        self._buffer: list[str] = []  # current name, key or value
        self._key = ""
        self._sends_value = False  # the value can only be a string, so it is streamed
        self._call = _Call(0, _ANY)
        self._num_calls = 0
        self._events: list[Event] = []

    @staticmethod
    @lru_cache(maxsize=64)
    def _grammar(ids: tuple[int | None, ...], *, reasoning: bool, parse_tools: bool) -> _Grammar:
        """`ids`: of TAGS, None for those that are no tokens."""
        moves = OutputParser._plan_moves(reasoning=reasoning, parse_tools=parse_tools)
        id_of = dict[str, int | None](zip(TAGS, ids, strict=True))
        tag_of_id = {token_id: tag for tag, token_id in id_of.items() if token_id is not None}
        spelled = {at: [tag for place, tag in moves if place is at and id_of[tag] is None] for at in _At}
        spelling = {at: re.compile("|".join(map(re.escape, tags))) if tags else None for at, tags in spelled.items()}
        return _Grammar(moves, tag_of_id, spelled, spelling)

    @staticmethod
    def _plan_moves(*, reasoning: bool, parse_tools: bool) -> _Moves:
        moves, parser = _Moves(), OutputParser
        if reasoning:
            for at in (_At.START, _At.REASONING):
                moves[at, THINK_END] = parser._enter_content
                moves[at, CALL] = parser._enter_content_at_call
            moves[_At.START, THINK] = parser._enter_reasoning
            moves[_At.CONTENT, THINK_END] = parser._ignore
        if parse_tools:
            moves[_At.CONTENT, CALL] = parser._open_call
            moves[_At.CONTENT, CALL_END] = parser._ignore
            moves[_At.NAME, CALL] = parser._reopen_call
            moves[_At.NAME, CALL_END] = parser._close_named_call
            moves[_At.NAME, KEY] = parser._open_first_key
            for at in (_At.PAIRS, _At.KEY, _At.AFTER_KEY):
                moves[at, CALL] = parser._close_and_open_call
                moves[at, CALL_END] = parser._close_call
                moves[at, KEY] = parser._open_key
            moves[_At.KEY, KEY_END] = parser._close_key
            moves[_At.KEY, VALUE] = parser._open_value_of_open_key
            moves[_At.AFTER_KEY, VALUE] = parser._open_value
            moves[_At.VALUE, VALUE_END] = parser._close_value
        return moves

    def feed(self, token_id: int | None, text: str) -> list[Event]:
        """Events of the next token with its text, or of text without a token.

        The text of a tag's token may begin with characters that earlier tokens left unfinished. It may lack the
        tag itself if special tokens are skipped; then the content does not show the tag either.
        """
        tag = None if token_id is None else self._tag_of_id.get(token_id)
        if tag is None:
            if text and not self._tail:  # short for most tokens: nothing changes, and no tag may be spelled
                if self._at is _At.CONTENT and self._blank is None and not self._spells_in_content:
                    return [ContentDelta(text)]
                if self._at is _At.REASONING and not self._spells_in_reasoning:
                    return [ReasoningDelta(text)]
            self._read(text)
        else:
            self._read(text.removesuffix(tag))
            self._release_tail()
            self._read_tag(tag, shown=text.endswith(tag))
        return self._take()

    def finish(self) -> list[Event]:
        """The last events: text held back as a possible tag, and a call whose name was never completed."""
        self._release_tail()
        if self._at is _At.NAME:
            self._give_back_call()
            self._at = _At.CONTENT
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _release_tail(self) -> None:
        tail, self._tail = self._tail, ""
        self._read_plain(tail)

    def _read(self, text: str) -> None:
        """Process text that may spell tags, after the text that was held back."""
        text, self._tail = self._tail + text, ""
        start = 0
        while start < len(text):
            spelling = self._spelling[self._at]
            found = spelling.search(text, start) if spelling else None
            if found is None:
                end = self._possible_tag(text, start)
                self._tail = text[end:]
                self._read_plain(text[start:end])
                return
            self._read_plain(text[start : found.start()])
            self._read_tag(found[0], shown=True)
            start = found.end()

    def _possible_tag(self, text: str, start: int) -> int:
        """Where a possible tag at the end of `text` begins; the end of `text` if there is none."""
        at = text.rfind("<", max(start, len(text) - _LONGEST_TAG))
        return at if at >= 0 and any(tag.startswith(text[at:]) for tag in self._spelled[self._at]) else len(text)

    def _read_tag(self, tag: str, *, shown: bool) -> None:
        """Process a tag: its action in this state, else it is text. Within a call it is data, shown or not."""
        move = self._moves.get((self._at, tag))
        if move is not None:
            move(self)
        elif shown or self._at not in (_At.START, _At.REASONING, _At.CONTENT):
            self._read_plain(tag)

    def _read_plain(self, text: str) -> None:
        """Process text without tags."""
        if not text:
            return
        match self._at:
            case _At.START | _At.REASONING:
                self._at = _At.REASONING
                self._events.append(ReasoningDelta(text))
            case _At.CONTENT:
                self._add_content(text)
            case _At.NAME | _At.KEY:
                self._buffer.append(text)
            case _At.PAIRS | _At.AFTER_KEY:
                pass
            case _At.VALUE:
                if self._sends_value:
                    self._send(dump(text)[1:-1])
                else:
                    self._buffer.append(text)

    def _add_content(self, text: str) -> None:
        """Add content. White space before the first other content is held back, and dropped if none follows."""
        if self._blank is not None:
            self._blank.append(text)
            if text.isspace():
                return
            text, self._blank = "".join(self._blank), None
        self._events.append(ContentDelta(text))

    def _ignore(self) -> None:
        pass

    def _enter_reasoning(self) -> None:
        self._at = _At.REASONING

    def _enter_content(self) -> None:
        self._at = _At.CONTENT

    def _enter_content_at_call(self) -> None:
        """A tool call ends the reasoning, and is parsed like one in the content."""
        self._at = _At.CONTENT
        self._read_tag(CALL, shown=True)

    def _open_call(self) -> None:
        self._at = _At.NAME
        self._buffer = []

    def _reopen_call(self) -> None:
        self._give_back_call()
        self._open_call()

    def _give_back_call(self) -> None:
        """The text after <tool_call> was not a name: it becomes content."""
        self._add_content(CALL + "".join(self._buffer))

    def _begin_call(self, tag: str) -> bool:
        """The name is complete, as `tag` follows: begin the call. Without a name, or of a function that may not be
        called, it is text, and so is the tag."""
        name = "".join(self._buffer).strip()
        arguments = self._functions.get(name)
        if arguments is None and self._functions:
            logger.warning("an answer calls %r, which is not one of the tools", name[:100])
            if self._only_offered:
                name = ""
        if not name:
            self._give_back_call()
            self._add_content(tag)
            self._at = _At.CONTENT
            return False
        self._call = _Call(self._num_calls, arguments or _ANY)
        self._num_calls += 1
        self._events.append(ToolCallStart(self._num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", name))
        return True

    def _close_named_call(self) -> None:
        if self._begin_call(CALL_END):
            self._close_call()

    def _open_first_key(self) -> None:
        if self._begin_call(KEY):
            self._open_key()

    def _open_key(self) -> None:
        """Begin a key. An earlier key without a value is dropped."""
        self._at = _At.KEY
        self._buffer = []
        if not self._call.is_open and not self._call.arguments.depend_on_each_other:
            self._call.is_open = True
            self._send("{")

    def _close_key(self) -> None:
        self._at = _At.AFTER_KEY
        self._key = "".join(self._buffer).strip()

    def _open_value_of_open_key(self) -> None:
        self._close_key()
        self._open_value()

    def _open_value(self) -> None:
        self._at = _At.VALUE
        self._buffer = []
        arguments = self._call.arguments
        self._sends_value = not arguments.depend_on_each_other and arguments.is_text(self._key)
        if self._sends_value:
            self._send(self._key_text() + '"')

    def _close_value(self) -> None:
        self._at = _At.PAIRS
        call, text = self._call, "".join(self._buffer)
        if call.arguments.depend_on_each_other:
            call.pairs.append((self._key, text))
        elif self._sends_value:
            self._send('"')
        else:
            self._send(self._key_text() + call.arguments.read(self._key, text))

    def _key_text(self) -> str:
        """The key as JSON, with a comma before it unless it is the first."""
        self._call.num_pairs += 1
        return f"{', ' if self._call.num_pairs > 1 else ''}{dump(self._key)}: "

    def _close_call(self) -> None:
        self._at = _At.CONTENT
        call = self._call
        if call.pairs:
            values = call.arguments.read_all(call.pairs)
            members = [f"{dump(key)}: {value}" for (key, _), value in zip(call.pairs, values, strict=True)]
            self._send(f"{{{', '.join(members)}}}")
        else:
            self._send("}" if call.is_open else "{}")
        self._events.append(ToolCallEnd(call.index))

    def _close_and_open_call(self) -> None:
        """An unclosed call ends where the next one begins."""
        self._close_call()
        self._open_call()

    def _send(self, delta: str) -> None:
        if delta:
            self._events.append(ToolCallArguments(self._call.index, delta))


def parse_ids(
    tokenizer: Tokenizer, ids: Sequence[int], tools: Any = None, *, reasoning: bool, parse_tools: bool = True
) -> Parsed:
    """Parse a complete answer from its token ids, ignoring stop tokens at the end."""
    parser, stream = OutputParser(tokenizer, tools, reasoning=reasoning, parse_tools=parse_tools), tokenizer.stream()
    end = len(ids)
    while end and ids[end - 1] in tokenizer.eos_ids:
        end -= 1
    events = [event for token_id in ids[:end] for event in parser.feed(token_id, stream.feed(token_id))]
    return collect([*events, *parser.feed(None, stream.finish()), *parser.finish()])
