"""Environments of the library verifiers (0.4), unchanged, as "verifiers/ID" or "verifiers/FOLDER/ID".

    an agent of the episode -> the harness below -> verifiers' interception -> the door below -> a turn of ours

FOLDER is a virtual environment with verifiers, msgspec and the package of ID; its Python runs the workers, and nothing
of verifiers is imported elsewhere. Each agent has a seat. A request that goes on from a conversation of its agent adds
what is new, so that what was sampled is never tokenized again. Another one, such as an edited history, begins a
conversation of its own, which earns what its agent earns.
"""

import asyncio
import importlib
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Lock, Thread
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from glm5.common.errors import ConfigError, reason_of
from glm5.rl.environments.play import as_message
from glm5.rl.environments.protocol import Environment, EpisodeFailed, FailureKind, Message, Reply, Task, Turn
from glm5.rl.environments.wire import MAX_FRAME
from glm5.rl.gateway.messages import is_reply, key_of

PREFIX = "verifiers/"
HARNESS = "glm5_chat"
"""Module name under which verifiers finds the harness."""
MAX_TASKS = 10_000
"""Of an environment; it may have infinitely many."""
FAILURES: dict[str, FailureKind] = {
    "ProviderError": "provider",
    "HarnessError": "harness",
    "ToolsetError": "environment",
    "SandboxError": "sandbox",
    "TaskError": "task",
}


def python_of(name: str) -> str:
    """The Python that runs an environment of any name."""
    folder = name.removeprefix(PREFIX).rpartition("/")[0] if name.startswith(PREFIX) else ""
    return str(Path(folder).absolute() / "bin/python") if folder else sys.executable


class Verifiers(Environment):
    """Seeds are its tasks in their order, the first MAX_TASKS in turn. Raises ConfigError where FOLDER has no Python;
    its tasks can be made in that Python alone."""

    def __init__(self, place: str) -> None:
        self.name, self._lock = PREFIX + place, Lock()
        if not Path(python_of(self.name)).exists():
            raise ConfigError(f"{self.name}: there is no {python_of(self.name)}; FOLDER is a virtual environment")
        self._running: _Running | None = None

    def task(self, seed: int, level: int) -> Task:
        data = self._run().task(seed).data
        asked = data.prompt_text or data.name or self.name
        given = {"place": seed % MAX_TASKS, "data": data.model_dump(mode="json")}
        return Task(self.name, seed, level, ({"role": "user", "content": asked},), given)

    def reset(self, task: Task) -> "VerifiersEpisode":
        return VerifiersEpisode(self._run(), self._run().task(task.data["place"]))

    def oracle(self, task: Task) -> Sequence[Reply]:
        raise ConfigError(f"{self.name}: verifiers has no solutions of tasks")

    def _run(self) -> "_Running":
        if sys.executable != python_of(self.name):
            raise ConfigError(
                f"{self.name}: only its workers make tasks; allowed is a recipe without warm_start or tasks_file, "
                "with model.checkpoint or model.tokenizer, not glm5 env check or glm5 rl filter"
            )
        with self._lock:
            if self._running is None:
                self._running = _Running(self.name.rpartition("/")[2])
            return self._running


@dataclass
class _Ask:
    """A request of an agent, by the id of its trace; a reply ends it."""

    agent: str
    messages: Sequence[Message]
    reply: asyncio.Future[Reply]


@dataclass
class _Seat:
    """A conversation of an agent, with what was sampled."""

    agent: str
    said: list[Message] = field(default_factory=list[Message])

    def goes_on(self, ask: _Ask) -> bool:
        """Whether a request says the same and something new, none of it in the policy's place."""
        new = {one["role"] for one in ask.messages[len(self.said) :]}
        is_same = self.agent == ask.agent and all(map(_same, ask.messages, self.said))
        return is_same and bool(new) and "assistant" not in new


def _same(given: Message, known: Message) -> bool:
    return is_reply(given, known) if known["role"] == "assistant" else key_of(given) == key_of(known)


class VerifiersEpisode:
    """An episode that runs in the thread of `running`; a step answers the agent that waits."""

    def __init__(self, running: "_Running", task: Any) -> None:
        self.asks: queue.SimpleQueue[_Ask | None] = queue.SimpleQueue()
        self._seats = list[_Seat]()
        self._ended: Future[Any] = running.play(self, task)
        self._ended.add_done_callback(lambda _: self.asks.put(None))
        self.messages: Sequence[Message] = self._next().messages

    def step(self, reply: Reply) -> Turn:
        seat, ask = self._waiting
        seat.said = [*ask.messages, as_message(reply)]
        ask.reply.get_loop().call_soon_threadsafe(_settle, ask.reply, reply)
        return self._next()

    def close(self) -> None:
        self._ended.cancel()
        ask = self._waiting[1]
        ask.reply.get_loop().call_soon_threadsafe(ask.reply.cancel)

    def _next(self) -> Turn:
        ask = self.asks.get()
        if ask is None:
            return self._end(self._ended.result())
        own = [seat for seat in self._seats if seat.goes_on(ask)]
        if not own:
            own = [_Seat(ask.agent)]
            self._seats += own
        seat = max(own, key=lambda one: len(one.said))
        self._waiting = seat, ask
        return Turn(tuple(ask.messages[len(seat.said) :]), seat=self._seats.index(seat))

    def _end(self, episode: Any) -> Turn:
        traces = {trace.id: trace for trace in episode.traces}
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            kind, reason = (errors[-1].type, errors[-1].message) if errors else ("", "it ended without a result")
            raise EpisodeFailed(FAILURES.get(kind, "environment"), f"{kind}: {reason}")
        if not self._seats:
            raise EpisodeFailed("environment", "the episode ended before it asked anything")
        own = [traces[seat.agent] for seat in self._seats]
        if fixed := [trace.agent.name for trace in own if not trace.agent.trainable]:
            raise EpisodeFailed("environment", f"agent {fixed[0]} is not trained, so it needs a model of its own")
        rewards = [{name: one.value for name, one in trace.rewards.items()} for trace in own]
        metrics = {name: float(value) for name, value in own[0].metrics.items() if value is not None}
        return Turn(is_done=True, rewards=rewards[0], metrics=metrics, seat_rewards=tuple(rewards[1:]))


def _settle(waiting: "asyncio.Future[Reply]", reply: Reply) -> None:
    if not waiting.done():
        waiting.set_result(reply)


class _Running:
    """verifiers in this process, in a thread of its own. Raises ConfigError where it or the environment is missing."""

    def __init__(self, identifier: str) -> None:
        try:
            self._vf: Any = importlib.import_module("verifiers.v1")
            self._http: Any = importlib.import_module("aiohttp")
            self._web: Any = importlib.import_module("aiohttp.web")
            sys.modules[HARNESS] = _module(self._vf, self._http)
            taskset = {"taskset": {"id": identifier}}
            plain = self._vf.resolve_env_config(taskset)
            agent = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
            roles = {name: agent for name, value in plain if isinstance(value, self._vf.AgentConfig)}
            self._env = self._vf.load_environment(self._vf.resolve_env_config(taskset | roles))
        except Exception as error:  # its packages raise what they like
            what = f"verifiers/{identifier}, in {sys.executable}: {reason_of(error)}"
            if isinstance(error, ModuleNotFoundError):
                what += f"; install what is missing there:  {sys.executable} -m pip install {error.name}"
            raise ConfigError(what) from error
        self._left, self._tasks, self._lock = iter(self._env.taskset), list[Any](), Lock()
        self._episodes: WeakValueDictionary[str, VerifiersEpisode] = WeakValueDictionary()
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    def task(self, seed: int) -> Any:
        """verifiers' task of a seed."""
        place = seed % MAX_TASKS
        with self._lock:
            self._tasks += islice(self._left, max(0, place + 1 - len(self._tasks)))
            if not self._tasks:
                raise ConfigError("the environment has no tasks")
            return self._tasks[place % len(self._tasks)]

    def play(self, episode: VerifiersEpisode, task: Any) -> Future[Any]:
        """Begin an episode; its result."""
        (slot,) = self._env.slots(task)
        own = self._env.run_slot(slot, self._model, on_trace=lambda trace: self._episodes.update({trace.id: episode}))
        return asyncio.run_coroutine_threadsafe(own, self._loop)

    async def _open(self) -> None:
        app = self._web.Application(client_max_size=MAX_FRAME)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = self._web.AppRunner(app)
        await runner.setup()
        await self._web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        client = self._vf.EvalClientConfig(base_url=url, api_key_var="GLM5_NO_KEY")
        self._model = self._vf.ModelContext(model="policy", client=client)
        self._serving = self._env.serving()
        await self._serving.__aenter__()

    async def _answer(self, request: Any) -> Any:
        """The door: a chat completion, which the policy gives."""
        agent, body = request.headers["X-Session-ID"], await request.json()
        messages = [{name: value for name, value in one.items() if value is not None} for one in body["messages"]]
        ask = _Ask(agent, messages, self._loop.create_future())
        self._episodes[agent].asks.put(ask)
        reply = await ask.reply
        choice = {"index": 0, "message": dict(as_message(reply)), "finish_reason": "stop"}
        if reply.is_truncated:
            choice["finish_reason"] = "length"
        answer = {"id": agent, "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return self._web.json_response(answer)


def _module(vf: Any, http: Any) -> ModuleType:
    """A module with the harness: a conversation without tools, in this process."""

    class Chat(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _wire(prompt)
            messages = [{"role": "system", "content": system}, *asked] if system else asked
            body, headers = {"model": ctx.model, "messages": messages}, {"Authorization": f"Bearer {secret}"}
            limits = {"timeout": http.ClientTimeout(total=None), "raise_for_status": True}
            async with http.ClientSession(**limits) as session, session.post(
                f"{endpoint}/chat/completions", json=body, headers=headers
            ) as answer:  # fmt: skip
                await answer.read()
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _wire(messages: Any) -> list[Any]:
        return [one.model_dump(mode="json", exclude_none=True) for one in messages or ()]

    module = ModuleType(HARNESS)
    module.__dict__.update(Chat=Chat, __all__=["Chat"])
    return module
