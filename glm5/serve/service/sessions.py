"""Sessions that the server keeps: conversations of agents as trees of tokens (`glm5.rl.gateway`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from glm5.chat.events import Event, collect
from glm5.chat.message import normalize_messages
from glm5.chat.template import ChatTemplate
from glm5.common.errors import RequestError
from glm5.engine.frontend.outputs import Delta
from glm5.engine.sampling.params import SamplingParams
from glm5.rl.gateway.session import Placed, Ruled, Session
from glm5.rl.segments import Segment

NO_SESSIONS = "this server keeps no sessions; start it with --max-sessions"


class Sessions:
    """By tenant and name. `most`: how many are kept when another begins, of `max_tokens` each. Raises RequestError
    beyond."""

    def __init__(self, template: ChatTemplate, most: int, max_tokens: int) -> None:
        self._template, self._most, self._max_tokens = template, most, max_tokens
        self._kept: dict[tuple[str, str], Session] = {}
        # Without an answer: forgotten where all that was asked is refused or cut off.
        self._begun: WeakValueDictionary[tuple[str, str], Session] = WeakValueDictionary()
        self._beginning = Lock()  # requests are prepared by several threads

    def of(self, tenant: str, name: str) -> Session:
        """The session of that name, which begins with its first request."""
        with self._beginning:
            session = self._kept.get((tenant, name)) or self._begun.get((tenant, name))
            if session is None:
                if len(self._kept) >= self._most:
                    raise RequestError(
                        f"the server keeps {self._most} sessions, which is all that --max-sessions allows; end one "
                        "with DELETE /sessions/NAME"
                    )
                keep = partial(self._keep, (tenant, name))
                session = self._begun[tenant, name] = Session(self._template, self._max_tokens, on_first=keep)
            return session

    def begin(self, tenant: str, name: str, ruled: Ruled) -> None:
        """Begin a session in which a trainer decides how is sampled."""
        self._kept[tenant, name] = Session(self._template, self._max_tokens, ruled)

    def find(self, tenant: str, name: str) -> Session | None:
        """The session of that name, if it has an answer."""
        return self._kept.get((tenant, name))

    def end(self, tenant: str, name: str) -> Session | None:
        """The session of that name, which is not kept any longer."""
        with self._beginning:
            self._begun.pop((tenant, name), None)
            return self._kept.pop((tenant, name), None)

    def _keep(self, key: tuple[str, str], session: Session) -> None:
        with self._beginning:
            if self._begun.get(key) is session:  # it was not ended meanwhile
                self._kept[key] = self._begun.pop(key)


@dataclass
class _Answer:
    segment: Segment = field(default_factory=lambda: Segment([], is_sampled=True))
    events: list[Event] = field(default_factory=list[Event])


class Recording:
    """The answers to one request of a session, each of which becomes a segment when it is complete. One that is cut
    off, by a client that leaves or an error, becomes none."""

    def __init__(self, session: Session, placed: Placed) -> None:
        self._session, self._placed = session, placed
        self._answers: dict[int, _Answer] = {}

    def params(self, params: SamplingParams) -> SamplingParams:
        """The request's parameters as a session needs them: with log-probabilities, and as a trainer rules."""
        changes = self._session.asked(params.max_tokens)
        return params.but(**changes, logprobs=0 if params.logprobs is None else params.logprobs)

    def options(self) -> dict[str, Any]:
        """Options of a session whose pages outlive pushes."""
        ruled = self._session.ruled
        return {"cache_salt": str(ruled.seed), "keeps_pages": True} if ruled is not None and ruled.keeps_pages else {}

    def add(self, delta: Delta, events: Sequence[Event]) -> None:
        """What a step added to an answer."""
        answer = self._answers.setdefault(delta.index, _Answer())
        segment = answer.segment
        segment.add(delta)
        answer.events += events
        if delta.finish_reason in ("stop", "length") and segment.token_ids:
            self._session.add(self._placed, _message(answer.events), segment)


def _message(events: Sequence[Event]) -> dict[str, object]:
    """What an answer says, normalized as clients' messages are."""
    parsed = collect(events)
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in parsed.tool_calls
        if call.complete
    ]
    message = {"role": "assistant", "content": parsed.content or "", "reasoning_content": parsed.reasoning or ""}
    (normal,) = normalize_messages([message | ({"tool_calls": calls} if calls else {})])
    return normal
