"""Plays the rollouts of one group: episodes in the environments' workers, replies by the policy.

    prompt -> reply -> the environment's answer -> reply -> ... -> rewards

Each request has a seed of its own, derived from the run's seed and the group's number, so that a group can be played
again to the same tokens. Where all episodes of a group begin with the same messages, their first replies are one
request: the prompt is computed once.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from glm5.common.errors import EngineDead, GlmError
from glm5.rl.environments.play import as_message
from glm5.rl.environments.protocol import EpisodeFailed, Reply, Task, Turn
from glm5.rl.environments.workers import EnvironmentWorkers, RemoteEpisode
from glm5.rl.rollout import Group, Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.conversation import Conversation
from glm5.rl.rollouts.guard import Guard
from glm5.rl.rollouts.policy import Policy, Sampled
from glm5.rl.segments import seed_of

LATE = "its group would have become too old while it went on"


Rewarding = Callable[[Group, str], Awaitable[None]]
"""What is done with the rewards of a group that has ended, given the name of its environment in the recipe."""


class Harness:
    """Plays groups. `workers` run the episodes, `policy` replies, `chat` turns messages into tokens. `reward`: if set,
    it is awaited with each group."""

    reward: Rewarding | None = None

    def __init__(self, policy: Policy, workers: EnvironmentWorkers, chat: TokenChat) -> None:
        self.policy, self.workers, self.chat = policy, workers, chat
        self.guard = None if policy.cfg.guard is None else Guard(policy.cfg.guard)

    async def play(
        self,
        task: Task,
        seed: int,
        count: int,
        on_episode: Callable[[int], None] = lambda _: None,
        late: asyncio.Event | None = None,
    ) -> list[list[Rollout]]:
        """`count` episodes of a task; of each the rollouts of its players, most often one. `on_episode` is called with
        the number of each as it ends. Once `late` is set, those that have not ended fail as stale. Raises
        EngineDead."""
        begun = await self.workers.reset_all(task, count)
        episodes = [one for one in begun if not isinstance(one, EpisodeFailed)]
        players = [_Player(self, task, seed, number, one, on_episode) for number, one in enumerate(begun)]
        try:
            with self.policy.engines.held(seed, count):
                await unless_late(self._play_all(players, episodes, seed), late)
            for player in players:
                player.give_up()
        finally:
            await asyncio.gather(*(episode.close() for episode in episodes if not episode.is_closed))
        return [player.rollouts for player in players]

    async def _play_all(self, players: Sequence["_Player"], episodes: Sequence[RemoteEpisode], seed: int) -> None:
        if len(episodes) == len(players) > 1 and all(one.messages == episodes[0].messages for one in episodes):
            await self._play_together(players, seed)
        else:
            await in_parallel(player.play() for player in players)

    async def _play_together(self, players: Sequence["_Player"], seed: int) -> None:
        """The first replies in one request; each goes on by itself once it has its own."""
        prompt = players[0].begin()
        for player in players[1:]:
            player.begin(prompt)
        async with asyncio.TaskGroup() as group:
            async for number, own_seed, sampled in self.policy.replies(prompt, seed, len(players), seed):
                group.create_task(players[number].play(sampled, own_seed))


class _Player:
    """One episode of a group."""

    def __init__(
        self,
        harness: Harness,
        task: Task,
        seed: int,
        number: int,
        episode: RemoteEpisode | EpisodeFailed,
        on_ended: Callable[[int], None],
    ) -> None:
        self.harness, self.task, self.seed, self.number, self.episode = harness, task, seed, number, episode
        self._on_ended = on_ended
        self.seats: dict[int, Conversation] = {}
        self.waited = 0.0  # seconds, for the environment
        self.has_ended = False
        self._began = time.monotonic()

    @property
    def rollouts(self) -> list[Rollout]:
        return [seat.rollout for _, seat in sorted(self.seats.items())]

    def begin(self, prompt: Sequence[int] = ()) -> list[int]:
        """Add the first prompt; returns its tokens. `prompt`: they, if they are known already."""
        assert not isinstance(self.episode, EpisodeFailed)
        seat = self._seat(0)
        seat.hear(self.episode.messages, prompt)
        return seat.token_ids

    async def play(self, first: Sampled | None = None, first_seed: int | None = None) -> None:
        """Play to the end. `first`: the first reply, if it has been sampled already, with its seed."""
        if isinstance(self.episode, EpisodeFailed):
            self._end(self.episode)
            return
        try:
            if first is None:
                self.begin()
            else:  # it has begun
                self._seat(0).rollout.seed = first_seed or 0
            await self._play(self.episode, first)
        except EpisodeFailed as failure:
            self._end(failure)
        except EngineDead:
            raise
        except GlmError as error:
            self._end(EpisodeFailed("harness", str(error)))
        else:
            self._end()

    def give_up(self) -> None:
        """Its group does not wait for it any longer, if it has not ended."""
        if not self.has_ended:
            self._end(EpisodeFailed("stale", LATE))

    async def _play(self, episode: RemoteEpisode, sampled: Sampled | None) -> None:
        turn, seat_number, num_turns = Turn(), 0, 0
        while not turn.is_done:
            seat = self._seat(seat_number)
            if sampled is None and seat.needs_summary:
                seat.ask_summary()
                summary = await self._sampled(seat, seat_number, num_turns, "summary")
                if summary is None:
                    return
                self._said(seat, summary)
                seat.resume()
            sampled = sampled or await self._sampled(seat, seat_number, num_turns)
            if sampled is None:
                return
            turn = await self._step(episode, seat, self._said(seat, sampled))
            num_turns, sampled = num_turns + 1, None
            if not turn.is_done:
                seat_number = turn.seat
                self._seat(seat_number).hear(turn.messages)
        parts = (turn.rewards, *turn.seat_rewards)
        for number, seat in self.seats.items():
            seat.rollout.rewards = dict(parts[number]) if number < len(parts) else {}
            seat.rollout.metrics |= turn.metrics

    async def _step(self, episode: RemoteEpisode, seat: Conversation, reply: Reply) -> Turn:
        began, guard = time.monotonic(), self.harness.guard
        try:
            return await (episode.step(reply) if guard is None else guard.step(episode, reply, seat.rollout))
        finally:
            self.waited += time.monotonic() - began

    async def _sampled(self, seat: Conversation, *place: int | str) -> Sampled | None:
        """The next reply; None where the context is full, which earns nothing."""
        if self.harness.policy.room(len(seat.token_ids)) < 1:
            seat.rollout.is_truncated = True
            return None
        return await self.harness.policy.reply(seat.token_ids, seed_of(self.seed, self.number, *place), self.seed)

    def _said(self, seat: Conversation, sampled: Sampled) -> Reply:
        """Add a reply to its conversation."""
        seat.add(sampled)
        seat.rollout.num_turns += 1
        seat.rollout.is_truncated = sampled.is_truncated
        reply = self.harness.chat.reply(
            sampled.token_ids, self.task.tools, is_truncated=sampled.is_truncated, num_calls=seat.num_calls
        )
        seat.num_calls += len(reply.tool_calls)
        seat.rollout.messages.append(as_message(reply))
        return reply

    def _seat(self, number: int) -> Conversation:
        if number not in self.seats:
            own = seed_of(self.seed, self.number, number, 0)
            rollout = Rollout(self.task, own, **self.harness.policy.sampling)
            self.seats[number] = Conversation(rollout, self.harness.chat, self.harness.policy.cfg)
        return self.seats[number]

    def _end(self, failure: EpisodeFailed | None = None) -> None:
        """The episode ends here; every player's rollout says why, if it failed."""
        self.has_ended = True
        self._seat(0)
        for seat in self.seats.values():
            if failure is not None:
                seat.rollout.failure, seat.rollout.failure_reason = failure.kind, failure.reason[:500]
            seat.close()
            seat.rollout.seconds = time.monotonic() - self._began
            seat.rollout.environment_seconds = self.waited
        self._on_ended(self.number)


async def unless_late(work: Coroutine[Any, Any, None], late: asyncio.Event | None) -> None:
    """Do the work, or as much of it as is done when `late` is set."""
    if late is None:
        await work
        return
    doing, waiting = asyncio.ensure_future(work), asyncio.ensure_future(late.wait())
    try:
        await asyncio.wait((doing, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        doing.cancel()
        await asyncio.wait((doing,))
    if not doing.cancelled():
        doing.result()


async def in_parallel(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for coroutine in coroutines:
            group.create_task(coroutine)
