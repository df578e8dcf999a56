"""An engine core that answers every request with the same reply, some seconds later. The path of its `Start` says how:
{"reply_ids": [...], "seconds": 0.5}."""

import json
import time
from collections import deque
from typing import Any

import msgspec

from glm5.engine.transport.wire import AddRequest, Answer, Start, StatsCall, TokenLogprobs, Update, Updates
from tests.support.cores import INFO, SCRIPTED_STATS

_TURN_S = 0.02
"""Longest sleep of a step, after which messages are read again."""


class LateCore:
    info = msgspec.structs.replace(
        INFO,
        max_num_seqs=4096,
        max_num_batched_tokens=4096,
        num_pages=1 << 20,
        max_model_len=1 << 20,
        vocab_size=1 << 20,
    )

    def __init__(self, reply_ids: list[int], seconds: float) -> None:
        self.reply_ids, self.seconds, self.num_answers = reply_ids, seconds, 0
        self._due = deque[tuple[float, AddRequest]]()
        self._out = list[Any]()

    @property
    def has_work(self) -> bool:
        return bool(self._out or self._due)

    def receive(self, message: Any) -> None:
        match message:
            case AddRequest():
                self._due.append((time.monotonic() + self.seconds, message))
            case StatsCall():
                pages = {"pages": {"all": 10, "in_use": 7, "idle": 3}, "last_push": {"seconds": 0.0}}
                self._out.append(Answer(message.call_id, SCRIPTED_STATS | pages | {"answers": self.num_answers}))
            case _ if hasattr(message, "call_id"):
                self._out.append(Answer(message.call_id, {"version": 1}))
            case _:
                pass

    def step(self) -> list[Any]:
        out, self._out = self._out, []
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, ask = self._due.popleft()
            rows = [TokenLogprobs(one, -1.0, -1.0, 1) for one in self.reply_ids]
            out.append(
                Updates([Update(one, self.reply_ids, 0, "stop", num_cached=0, logprobs=rows) for one in ask.seq_ids])
            )
            self.num_answers += len(ask.seq_ids)
        if not out and self._due:
            time.sleep(min(self._due[0][0] - now, _TURN_S))
        return out

    def close(self) -> None: ...


def build(start: Start, on_progress: Any) -> LateCore:
    on_progress("loading", 1.0)
    return LateCore(**json.loads(start.path))
