"""An engine that gives every answer one token a step and computes nothing, for a process of its own.

`build` is the builder that `glm5.engine.process` calls. The model's folder has a file STEP_RATE with the steps a
second, 0 for as many as possible.
"""

import time
from pathlib import Path
from typing import Any

from glm5.engine.transport import wire

STEP_RATE = "step_rate.txt"


class ScriptedEngine:
    """Token n of an answer is a function of n and of the answer's number, so that texts differ."""

    def __init__(self, info: wire.EngineInfo, step_rate: float):
        self.info = info
        self._seconds = 1 / step_rate if step_rate else 0.0
        self._next = time.monotonic()
        self._lengths: dict[int, int] = {}  # tokens that are left
        self._begun: set[int] = set()
        self._answers: list[Any] = []

    @property
    def has_work(self) -> bool:
        return bool(self._lengths or self._answers)

    def receive(self, message: wire.ToEngine) -> None:
        match message:
            case wire.AddRequest():
                if not self._lengths:
                    self._next = time.monotonic()
                self._lengths |= dict.fromkeys(message.seq_ids, message.max_tokens)
            case wire.AbortRequests(seq_ids=seq_ids):
                for seq_id in list(self._lengths) if seq_ids is None else seq_ids:
                    self._lengths.pop(seq_id, None)
                    self._begun.discard(seq_id)
            case wire.StopAnswer(seq_id=seq_id):
                self._lengths.pop(seq_id, None)
            case wire.Leave(client):
                for seq_id in [each for each in self._lengths if wire.client_of(each) == client]:
                    del self._lengths[seq_id]
                    self._begun.discard(seq_id)
            case wire.Close() | wire.Join() | wire.Listen():
                raise AssertionError("the process handles these")
            case _:
                self._answers.append(wire.Answer(message.call_id))

    def step(self) -> list[Any]:
        """A step, at its time."""
        messages, self._answers = self._answers, []
        if not self._lengths:
            return messages
        if (wait := self._next - time.monotonic()) > 0:
            time.sleep(wait)
        self._next += self._seconds
        updates: list[wire.Update] = []
        seq_ids: list[int] = []
        token_ids: list[int] = []
        for seq_id, left in list(self._lengths.items()):
            token_id, is_first = ord("a") - 33 + (7 * seq_id + left) % 26, seq_id not in self._begun
            if is_first or left == 1:
                update = wire.Update(seq_id, [token_id], 0, "length" if left == 1 else None)
                if is_first:
                    update.num_cached, update.began = 0, time.monotonic()
                    self._begun.add(seq_id)
                updates.append(update)
            else:
                seq_ids.append(seq_id)
                token_ids.append(token_id)
            self._lengths[seq_id] = left - 1
            if left == 1:
                del self._lengths[seq_id]
                self._begun.discard(seq_id)
        return [*messages, wire.Updates(updates, wire.Growth(0, seq_ids, token_ids))]

    def close(self) -> None:
        """There is nothing to write."""


def build(start: wire.Start, on_progress: Any) -> ScriptedEngine:
    """See above. The info is that of an engine with room for every request."""
    del on_progress
    max_num_seqs = start.config["max_num_seqs"]
    info = wire.EngineInfo(
        page_size=64,
        num_pages=max_num_seqs * 1024,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=start.config["max_model_len"],
        max_depth=0,
        vocab_size=320,
        max_logprobs=20,
        routed_experts=False,
        table=[("engine", "scripted")],
    )
    return ScriptedEngine(info, float(Path(start.path, STEP_RATE).read_text()))
