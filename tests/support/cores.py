"""An engine core that counts instead of computing, and fails when a test's script says so: in this process or a child.

Answer i of a prompt that ends in token t is t + 1 + i, t + 2 + i, ... A script is "fault@step", such as "hang@3".
"""

import os
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

from glm5.common.errors import ConfigError
from glm5.engine.transport import wire
from glm5.engine.transport.wire import AbortRequests, AddRequest, Answer, EngineInfo, Start, StopAnswer, Update, Updates

INFO = EngineInfo(
    page_size=64,
    num_pages=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=1024,
    max_depth=3,
    vocab_size=320,
    max_logprobs=20,
    routed_experts=True,
    table=[("cache", "16 pages")],
)

SCRIPTED_STATS = {
    "prompting": 1,
    "decoding": 2,
    "waiting": 3,
    "held": 1,
    "retracted": 0,
    "waiting_tokens": 700,
    "uncached_tokens": 600,
    "sampled_tokens": 5000,
    "prefill": {"tokens": 4000, "busy_us": 90000},
    "decode_moments": [10, 20, 30, 40, 50, 60],
    "steps": 40,
    "rows": 500,
    "preemptions": 1,
    "pages": {"all": 200, "in_use": 50, "idle": 10},
    "prefix_cache": {"query_tokens": 1000, "hit_tokens": {"device": 300, "host": 20, "disk": 1}},
    "tiers": {"damaged": 2, "disk_damaged": 5},
    "speculation": {"depth": 2, "drafted": [100, 80], "accepted": [90, 40]},
    "weight_version": 4,
    "is_sleeping": False,
    "weights_are_torn": False,
    "last_push": None,
}


@dataclass
class Counting:
    ask: AddRequest
    index: int
    next_id: int
    num_tokens: int = 0


@dataclass
class ScriptedCore:
    """`tokens_per_step` for each running answer; `asks` are all requests that came, `received` all messages' names."""

    script: str = ""
    info: EngineInfo = INFO
    tokens_per_step: int = 1
    running: dict[int, Counting] = field(default_factory=dict)
    asks: list[AddRequest] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    num_steps: int = 0
    is_closed: bool = False
    paused: bool = False
    gate: threading.Semaphore | None = None
    out: list[Any] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self.out or (self.running and not self.paused))

    def receive(self, message: Any) -> None:
        self.received.append(type(message).__name__)
        match message:
            case AddRequest():
                self.asks.append(message)
                for index, seq_id in enumerate(message.seq_ids):
                    first = (message.prompt_ids[-1] + 1 + index) % self.info.vocab_size
                    self.running[seq_id] = Counting(message, index, first)
            case AbortRequests():
                for seq_id in list(self.running) if message.seq_ids is None else message.seq_ids:
                    if self.running.pop(seq_id, None) is not None:
                        self.out.append(Updates([Update(seq_id, [], 0, "abort")]))
            case StopAnswer():
                self.running.pop(message.seq_id, None)
            case wire.Leave():
                for seq_id in [one for one in self.running if wire.client_of(one) == message.client]:
                    del self.running[seq_id]
            case wire.PauseCall() | wire.ResumeCall():
                self.paused = isinstance(message, wire.PauseCall)
                self.out.append(Answer(message.call_id))
            case wire.StatsCall():
                stats = {"heard": self.received, "running": len(self.running), "pid": os.getpid()}
                self.out.append(Answer(message.call_id, SCRIPTED_STATS | stats))
            case wire.SleepCall():
                self.out.append(Answer(message.call_id, {"freed_bytes": 10 * message.level}))
            case wire.PushCall():
                self.out.append(Answer(message.call_id, {"version": message.version or 1}))
            case wire.UpdateWeightsCall():
                self.out.append(self._updated(message))
            case _:
                self.out.append(Answer(message.call_id))

    def step(self) -> list[Any]:
        if self.gate is not None:
            self.gate.acquire()
        self.num_steps += 1
        self._obey()
        out, self.out = self.out, []
        if self.running and not self.paused:
            out.append(Updates([self._grow(seq_id) for seq_id in list(self.running)]))
        return out

    def close(self) -> None:
        self.is_closed = True
        if self.script == "hang-at-close@0":
            threading.Event().wait()

    def _updated(self, call: wire.UpdateWeightsCall) -> Answer:
        if not os.path.isdir(call.path):
            return Answer(call.call_id, error=f"{call.path}: no such directory", kind="CheckpointError")
        return Answer(call.call_id, {"version": call.version or 1, "files": sorted(os.listdir(call.path))})

    def _grow(self, seq_id: int) -> Update:
        answer = self.running[seq_id]
        ask, token_ids, reason = answer.ask, [], None
        while len(token_ids) < self.tokens_per_step and reason is None:
            token_ids.append(answer.next_id)
            answer.num_tokens += 1
            answer.next_id = (answer.next_id + 1) % self.info.vocab_size
            if token_ids[-1] in ask.stop_ids and answer.num_tokens > ask.params.min_tokens:
                reason = "stop"
            elif answer.num_tokens == ask.max_tokens:
                reason = "length"
        if reason is not None:
            del self.running[seq_id]
        first = answer.num_tokens == len(token_ids)
        return Update(seq_id, token_ids, 0, reason, num_cached=0 if first else None)

    def _obey(self) -> None:
        fault, _, step = self.script.partition("@")
        if not fault or self.num_steps != int(step):
            return
        match fault:
            case "raise":
                raise ValueError("a bug in a step")
            case "oom":
                raise MemoryError("no room")
            case "torch-oom":
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 99 bytes")
            case "hang":
                threading.Event().wait()
            case "exit":
                os._exit(5)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case _:
                raise AssertionError(self.script)


def build(start: Start, on_progress: Any) -> ScriptedCore:
    """For a child process: the path is the script."""
    script = os.path.basename(start.path)
    on_progress("loading", 0.5)
    match script:
        case "refuse":
            raise ConfigError("max_model_len: got 9; allowed: up to 8")
        case "broken":
            raise ValueError("a bug at the start")
    on_progress("loading", 1.0)
    return ScriptedCore("" if "@" not in script else script)


def scripted_start(script: str, **fields: Any) -> Start:
    """In the place of `Start`: has a process build the core of a script."""
    return Start(**fields | {"path": script, "builder": "tests.support.cores:build"})
