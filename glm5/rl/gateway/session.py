"""One agent's conversations as a tree of segments: what was sampled stays as it was, and only what is new is tokenized.

    request -> the longest path that says the same -> its tokens + what is new, rendered after the last reply
            -> reply -> a new segment

A client that edits its history, retries, compacts it or starts a sub-agent makes a branch; nothing that was sampled is
ever rewritten or tokenized again. A reply belongs to one segment, whichever paths go through it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from glm5.chat.continuation import Continuations, joined
from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import ConfigError, RequestError
from glm5.rl.gateway.messages import Message, is_reply, key_of, setting_key
from glm5.rl.segments import Segment, SegmentTree, seed_of

_INNER = frozenset(bytes([one]) for one in range(0x80, 0xC0))  # bytes of UTF-8 that begin no character


@dataclass
class _Node:
    """A segment of the tree. Of a context: `keys` of the messages that it stands for, after its parent's; of a root
    also `setting`, the key of its tools and the template's options. Of a reply: `reply`, what it says, and the
    `request` that it answers. `is_text`: of a completion, which has no messages."""

    segment: int
    keys: list[str] = field(default_factory=list[str])
    setting: str = ""
    reply: Message | None = None
    request: object = None
    is_text: bool = False
    children: list["_Node"] = field(default_factory=list["_Node"])


@dataclass
class Placed:
    """A request's place in the tree, and the tokens of its prompt. Its `context`, where it is new, joins the tree
    behind the reply `after` with the first answer: a request that is refused or cut off leaves nothing. `request`: the
    same for the prompts of one request, whose answers do not abandon each other."""

    node: _Node
    ids: list[int]
    context: Segment | None = None
    after: _Node | None = None
    request: object = field(default_factory=object)


@dataclass(frozen=True)
class Ruled:
    """What a trainer decides in the place of an agent: `sampling` parameters by name, `options` of the template, the
    most tokens of a reply, and the `seed` that those of all requests are derived from. `keeps_pages`: those of the
    session outlive pushes."""

    sampling: Mapping[str, float | int]
    options: Mapping[str, Any]
    max_tokens: int
    seed: int
    keeps_pages: bool = False


class Session:
    """The conversations of one agent. `max_tokens`: of all segments together; RequestError beyond. `on_first` is
    called with it before its first answer is added. Methods may be called from several threads."""

    def __init__(
        self,
        template: ChatTemplate,
        max_tokens: int,
        ruled: Ruled | None = None,
        on_first: Callable[["Session"], None] = lambda _: None,
    ) -> None:
        self.tree, self.num_forks, self.ruled = SegmentTree(), 0, ruled
        self._num_requests, self._on_first = 0, on_first
        self._template, self._max_tokens, self._num_tokens = template, max_tokens, 0
        self._roots: list[_Node] = []
        self._continuations: dict[str, Continuations] = {}
        self._lock = Lock()

    def place(self, messages: Sequence[Message], tools: Any, options: Mapping[str, Any]) -> Placed:
        """Where a request goes on. `messages` and `tools` are normalized, `options` are for the template; reasoning of
        earlier turns is always kept. Raises RequestError for what a template refuses, and where the session is full."""
        options = {**options, **(self.ruled.options if self.ruled is not None else {}), "clear_thinking": False}
        keys, setting = [key_of(one) for one in messages], setting_key(tools, options)
        with self._lock:  # not while tokens are made, which takes seconds: an event loop waits for it, too
            path, position = self._longest(messages, keys, setting)
        if path and position == len(messages) and path[-1].reply is None:
            return Placed(path[-1], self.tree.token_ids(path[-1].segment))  # asked again
        while path and path[-1].reply is None:  # a context of which a part is the same
            position -= len(path.pop().keys)
        if path and position < len(messages):
            try:
                return self._goes_on(path[-1], messages[position:], bool(tools), options)
            except ConfigError:
                pass  # the template cannot append to this: a beginning of its own
        return self._begins(messages, tools, options)

    def place_text(self, prompt: str | Sequence[int], tokenizer: Tokenizer) -> Placed:
        """Where a completion goes on: after the longest path of completions that `prompt` begins with, be it text or
        tokens, so that only the rest is tokenized. Raises RequestError as `place` does."""
        given = prompt.encode() if isinstance(prompt, str) else list(prompt)
        with self._lock:
            node, position, num_left_out = self._longest_text(given, tokenizer)
        known = [] if node is None else self.tree.token_ids(node.segment)
        ids = known[: len(known) - num_left_out]
        if node is not None and position == len(given) and not num_left_out:
            return Placed(node, ids)  # asked again, or nothing new after a reply
        rest = given[position:]
        new = tokenizer.encode(rest.decode()) if isinstance(rest, bytes) else rest
        after = None if num_left_out else node
        segment = Segment([*ids, *new]) if after is None else Segment(new, after.segment)
        return self._placed(_Node(-1, is_text=True), segment, [*ids, *new], after)

    def aside(self, ids: Sequence[int]) -> Placed:
        """A prompt that no later request goes on from, such as one that ends within a reply."""
        return self._placed(_Node(-1), Segment(list(ids)), list(ids))

    def add(self, placed: Placed, reply: Message, segment: Segment) -> int:
        """A reply to a placed request was sampled: the index of its segment. `segment`: without a parent."""
        with self._lock:
            self._join(placed, len(segment.token_ids))
            segment.parent = placed.node.segment
            index = self.tree.add(segment)
            placed.node.children.append(_Node(index, reply=reply, request=placed.request))
            return index

    def asked(self, max_tokens: int | None) -> dict[str, Any]:
        """Sampling parameters of the next request that are not the agent's to choose; `max_tokens`: the agent's."""
        if self.ruled is None:
            return {}
        with self._lock:
            number, self._num_requests = self._num_requests, self._num_requests + 1
        most = self.ruled.max_tokens if max_tokens is None else min(max_tokens, self.ruled.max_tokens)
        return {**self.ruled.sampling, "max_tokens": most, "seed": seed_of(self.ruled.seed, number)}

    def trained(self) -> SegmentTree:
        """The tree without abandoned replies, and without contexts that nothing was sampled after."""
        return self.tree.trained(self.abandoned())

    def abandoned(self) -> set[int]:
        """Replies that nobody went on from, though the same was asked again later: of retries."""
        with self._lock:
            found: set[int] = set()
            waiting = list(self._roots)
            while waiting:
                node = waiting.pop()
                waiting += node.children
                replies = [one for one in node.children if one.reply is not None]
                found |= {one.segment for one in replies if one.request is not replies[-1].request and not one.children}
            return found

    def _longest(self, messages: Sequence[Message], keys: Sequence[str], setting: str) -> tuple[list[_Node], int]:
        """The nodes of the longest path that says the same as the first messages, of these `keys`, and their number."""
        best: tuple[int, list[_Node]] = (0, [])
        waiting: list[tuple[list[_Node], int]] = []
        for root in self._roots:
            count = len(root.keys)
            if root.setting == setting and keys[:count] == root.keys:
                waiting.append(([root], count))
        while waiting:
            path, position = waiting.pop(0)
            if position >= best[0]:  # of equal ones the one that was added last
                best = (position, path)
            for child in path[-1].children:
                if child.reply is None:
                    count = len(child.keys)
                    if keys[position : position + count] == child.keys:
                        waiting.append(([*path, child], position + count))
                elif position < len(messages) and is_reply(messages[position], child.reply):
                    waiting.append(([*path, child], position + 1))
        return best[1], best[0]

    def _longest_text(self, given: bytes | list[int], tokenizer: Tokenizer) -> tuple[_Node | None, int, int]:
        """The last node of the longest path of completions that a prompt (UTF-8 or tokens) begins with, up to a reply
        or the whole of it, and how much of the prompt that is. The end of a reply may be absent, since its text has
        none: the number of the path's last tokens that are left out."""
        best: tuple[_Node | None, int, int] = (None, 0, 0)
        waiting = [(root, 0) for root in self._roots if root.is_text]
        while waiting:
            node, position = waiting.pop()
            own = self.tree.segments[node.segment].token_ids
            has_end = node.reply is not None and own[-1] in tokenizer.eos_ids
            for ids in (own, own[:-1]) if has_end else (own,):
                part = b"".join(map(tokenizer.bytes_of, ids)) if isinstance(given, bytes) else ids
                if given[position : position + len(part)] != part:
                    continue
                end = position + len(part)
                # A reply may end within a character of the text, whose rest cannot be tokenized by itself.
                is_split = isinstance(given, bytes) and given[end : end + 1] in _INNER
                if end > best[1] and not is_split and (node.reply is not None or end == len(given)):
                    best = node, end, len(own) - len(ids)
                if ids is own:
                    waiting += ((child, end) for child in node.children)
                break
        return best

    def _goes_on(
        self, after: _Node, messages: Sequence[Message], has_tools: bool, options: Mapping[str, Any]
    ) -> Placed:
        assert after.reply is not None
        call_ids = [call["id"] for call in after.reply.get("tool_calls") or ()]
        key = repr(sorted(options.items()))
        if (known := self._continuations.get(key)) is None:
            known = self._continuations[key] = Continuations(self._template, options)
        ids = known.after(messages, has_tools=has_tools, call_ids=call_ids)
        before = self.tree.token_ids(after.segment)
        ids = joined(ids, before[-1])
        node = _Node(-1, [key_of(one) for one in messages])
        return self._placed(node, Segment(ids, after.segment), [*before, *ids], after)

    def _begins(self, messages: Sequence[Message], tools: Any, options: Mapping[str, Any]) -> Placed:
        ids = self._template.encode([dict(one) for one in messages], tools, **options)
        node = _Node(-1, [key_of(one) for one in messages], setting_key(tools, options))
        return self._placed(node, Segment(ids), ids)

    def _placed(self, node: _Node, context: Segment, ids: list[int], after: _Node | None = None) -> Placed:
        self._check(len(context.token_ids))
        return Placed(node, ids, context, after)

    def _join(self, placed: Placed, num_more: int) -> None:
        """Add the context of a request, unless the same has come meanwhile, and count it and the tokens that follow it.
        Beside others it is a fork."""
        context, node = placed.context, placed.node
        others = self._roots if placed.after is None else placed.after.children
        if context is not None:
            named = (None, node.keys, node.setting, node.is_text)
            alike = (one for one in others if (one.reply, one.keys, one.setting, one.is_text) == named)
            same = (one for one in alike if self.tree.segments[one.segment].token_ids == context.token_ids)
            if (known := next(same, None)) is not None:
                placed.node, context = known, None
        num_tokens = num_more + (0 if context is None else len(context.token_ids))
        self._check(num_tokens)
        self._num_tokens += num_tokens
        placed.context = None
        if context is not None:
            if not self.tree.segments:
                self._on_first(self)
            node.segment = self.tree.add(context)
            self.num_forks += bool(others)
            others.append(node)

    def _check(self, num_tokens: int) -> None:
        if self._num_tokens + num_tokens > self._max_tokens:
            raise RequestError(
                f"the session has {self._num_tokens:,} tokens, and {num_tokens:,} more exceed {self._max_tokens:,}; "
                "end it, and begin another"
            )
