"""Plays the rollouts of one group by a program: an agent with a loop and tools of its own.

    task -> the program -> requests to the gateway, in a session -> its last words -> the environment -> rewards

What is trained is the session's tree: the tokens that the policy sampled, whatever the program made of them.
"""

import asyncio
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from glm5.config.rl import AgentSection
from glm5.engine import AsyncEngine
from glm5.rl.environments.protocol import EpisodeFailed, Message, Reply, Task
from glm5.rl.environments.workers import EnvironmentWorkers, RemoteEpisode
from glm5.rl.gateway.session import Ruled, Session
from glm5.rl.rollout import Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.harness import LATE, Rewarding, in_parallel, unless_late
from glm5.rl.rollouts.policy import Policy
from glm5.rl.segments import seed_of

MAX_OUTPUT = 1 << 20  # bytes of what a program says
_SHOWN = 300  # characters of an error


class Gateway(Protocol):
    """A server of all engines with sessions, which answers to `key`. `environment`: of this process, for programs."""

    key: str
    environment: Mapping[str, str]

    def begin(self, name: str, ruled: Ruled, engine: AsyncEngine) -> str:
        """Begin a session, which this engine answers; returns its URL."""
        ...

    def end(self, name: str) -> Session:
        """The session, which ends."""
        ...


class ProgramHarness:
    """Plays groups as `Harness` does, by a program for each episode. All of a group speak to one engine; if it ends,
    episodes that have not ended are played again, by another one."""

    reward: Rewarding | None = None

    def __init__(
        self, policy: Policy, workers: EnvironmentWorkers, chat: TokenChat, gateway: Gateway, cfg: AgentSection
    ) -> None:
        self.policy, self.workers, self._chat, self._gateway, self._cfg = policy, workers, chat, gateway, cfg

    async def play(
        self,
        task: Task,
        seed: int,
        count: int,
        on_episode: Callable[[int], None] = lambda _: None,
        late: asyncio.Event | None = None,
    ) -> list[list[Rollout]]:
        """`count` episodes of a task, each with one rollout. `on_episode` is called with the number of each as it ends.
        Once `late` is set, those that have not ended fail as stale. Raises EngineDead."""
        begun = await self.workers.reset_all(task, count)
        ended: dict[int, Rollout] = {}

        async def one(number: int) -> None:
            began = time.monotonic()
            while (rollout := await self._play(task, seed_of(seed, number), begun[number], seed)) is None:
                await _close(begun[number])
                (begun[number],) = await self.workers.reset_all(task, 1)
            rollout.seconds = time.monotonic() - began
            ended[number] = rollout
            on_episode(number)

        try:
            with self.policy.engines.held(seed, count):
                await unless_late(in_parallel(map(one, range(count))), late)
            for number in range(count):
                if number not in ended:
                    ended[number] = Rollout(task, seed_of(seed, number), failure="stale", failure_reason=LATE)
                    on_episode(number)
            return [[ended[number]] for number in range(count)]
        finally:
            for episode in begun:
                await _close(episode)

    async def _play(self, task: Task, seed: int, episode: RemoteEpisode | EpisodeFailed, key: int) -> Rollout | None:
        """None: its engine has ended, and there is another one. Raises EngineDead where there is none."""
        sampling = self.policy.sampling
        rollout = Rollout(task, seed, **sampling)
        if isinstance(episode, EpisodeFailed):
            rollout.failure, rollout.failure_reason = episode.kind, episode.reason[:500]
            return rollout
        options = {"enable_thinking": self._chat.enable_thinking}
        ruled = Ruled(sampling, options, self.policy.cfg.max_tokens, seed, self.policy.keeps_pages)
        engine, name = self.policy.engines.of(key), secrets.token_hex(8)  # seeds of an evaluation come twice
        url = self._gateway.begin(name, ruled, engine)
        rollout.messages += episode.messages
        try:
            said = await self._run(url, episode.messages)
            rollout.messages.append({"role": "assistant", "content": said})
            turn = await episode.step(Reply(said))
            if not turn.is_done:
                raise EpisodeFailed("harness", "the environment asks for another turn, which a program cannot take")
            rollout.rewards, rollout.metrics = dict(turn.rewards), dict(turn.metrics)
        except EpisodeFailed as failure:
            if not engine.is_ready:  # not the program's fault
                self.policy.engines.of(key)
                return None
            rollout.failure, rollout.failure_reason = failure.kind, failure.reason[:500]
        finally:
            session = self._gateway.end(name)
        rollout.tree = session.trained()
        rollout.num_turns = sum(one.is_sampled for one in rollout.tree.segments)
        rollout.metrics["forks"] = float(session.num_forks)
        return rollout

    async def _run(self, url: str, messages: tuple[Message, ...]) -> str:
        """What the program says last. Raises EpisodeFailed("harness") where it fails or takes too long."""
        with tempfile.TemporaryDirectory(prefix="glm5-agent-") as folder:
            keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), self._gateway.key)
            urls = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url}
            process = await asyncio.create_subprocess_exec(
                *self._cfg.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder,
                env={**self._gateway.environment, "HOME": folder, **keys, **urls},
                start_new_session=True,
                limit=MAX_OUTPUT,
            )
            try:
                given = json.dumps({"messages": list(messages)}).encode()
                said, errors = await asyncio.wait_for(_talk(process, given), self._cfg.timeout_s)
            except TimeoutError:
                raise EpisodeFailed("harness", f"the program took more than {self._cfg.timeout_s:g} s") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            last = errors.decode(errors="replace").strip()[-_SHOWN:]
            raise EpisodeFailed("harness", f"the program ended with code {process.returncode}: {last}")
        return said.decode(errors="replace").strip()


async def _close(episode: RemoteEpisode | EpisodeFailed) -> None:
    if isinstance(episode, RemoteEpisode):
        await episode.close()


async def _talk(process: asyncio.subprocess.Process, given: bytes) -> tuple[bytes, bytes]:
    """Give it the task; returns what it writes, which is bounded, once it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(given)
        await process.stdin.drain()
    process.stdin.close()
    said, errors = await asyncio.gather(_read(process.stdout), _read(process.stderr))
    await process.wait()
    return said, errors


async def _read(stream: asyncio.StreamReader) -> bytes:
    """All that is written; the last part where it is too much."""
    found = b""
    while part := await stream.read(1 << 16):
        found = (found + part)[-MAX_OUTPUT:]
    return found
