"""Conversations that a model is first taught on, and that a tokenizer is learnt from: with replies that are random but
legal, or the solution where an environment has no random ones. Programs of solutions run in boxes."""

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count, groupby
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import ConfigError, TrainingError
from glm5.common.interrupt import end_with_parent
from glm5.config.rl import RLRecipe, Rollouts
from glm5.rl.environments.boxes import Boxes
from glm5.rl.environments.mixture import Mixture
from glm5.rl.environments.play import play_randomly, play_solution
from glm5.rl.environments.protocol import Environment, EpisodeFailed, Message, Reply, Task, with_system
from glm5.rl.environments.table import make
from glm5.rl.rollout import Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.conversation import GO_ON, REQUEST, Conversation
from glm5.rl.sandbox.choice import choose_backend
from glm5.rl.sandbox.sandbox import SandboxFailed
from glm5.rl.segments import Segment
from glm5.rl.tasks import TaskSource
from glm5.rl.training.sequences import sequences_of

TOKENIZER_GAMES = 400
"""Of each environment, from which a tokenizer is learnt."""
AT_A_TIME = 64  # games that a process makes in one go

Example = tuple[list[int], list[bool]]
"""Token ids, and for each whether a reply has it."""
Chat = tuple[list[Message], Sequence[Mapping[str, Any]]]
"""Messages and tools."""


class ShownGames:
    """Of a recipe: environments by weight, the tasks of each in turn."""

    def __init__(self, recipe: RLRecipe, environments: Mapping[str, Environment], tasks: TaskSource) -> None:
        self._recipe, self._tasks = recipe, tasks
        self._environments = {name: _playable(name, one, tasks) for name, one in environments.items()}
        self._mixture = Mixture({one.name: one.weight for one in recipe.environment})
        self._compacts = recipe.rollouts.context is not None and recipe.rollouts.context.compacts

    def texts(self, template: ChatTemplate) -> Iterator[str]:
        """What a tokenizer is learnt from: the messages, and prompts that list tools."""
        for number in range(TOKENIZER_GAMES * len(self._recipe.environment)):
            for messages, tools in self._chats(number, self._recipe.seed):
                yield from (str(message.get("content") or "") for message in messages)
                if self._compacts:
                    yield from (REQUEST, GO_ON)
                if tools:
                    yield template.render(messages[:1], list(tools))

    def examples(self, chat: TokenChat, numbers: Iterable[int]) -> list[Example]:
        """Of the games with these numbers, in tokens."""
        seed, found = self._recipe.seed + 1, list[Example]()
        for number in numbers:
            environment, task = self._game(number)
            for messages, tools in self._chats(number, seed):
                if self._compacts and hasattr(environment, "random_reply"):
                    random = Random(f"summaries {seed} {number}")
                    say = partial(environment.random_reply, task, random, REQUEST)  # pyright: ignore[reportAttributeAccessIssue]
                    found += compacted(chat, task, self._recipe.rollouts, messages, say)
                else:
                    found.append(chat.conversation(messages, tools))
        return found

    def _game(self, number: int) -> tuple[Environment, Task]:
        name = self._mixture.draw(number)
        environment = self._environments[name]
        return environment, environment.task(*self._tasks.sections[name].shown(number))

    def _chats(self, number: int, seed: int) -> list[Chat]:
        """Of each player of an episode. ConfigError for a solution that cannot be played."""
        environment, task = self._game(number)
        try:
            if hasattr(environment, "random_reply"):
                chats = play_randomly(environment, task, Random(f"{seed} {number}")).conversations  # pyright: ignore[reportArgumentType]
            else:
                chats = play_solution(environment, task)
        except (EpisodeFailed, SandboxFailed) as failure:
            raise _not_shown(environment.name, task.level, failure) from None
        system = self._recipe.rollouts.system
        return [(with_system(system, messages), task.tools) for messages in chats]


def _playable(name: str, environment: Environment, tasks: TaskSource) -> Environment:
    """The environment, with boxes where its solutions run programs. ConfigError where none can be had."""
    level = tasks.sections[name].shown(0)[1]
    if level not in environment.sandbox_levels or hasattr(environment, "random_reply"):
        return environment
    try:
        return make(name, Boxes.of(choose_backend()))
    except ConfigError as error:
        raise _not_shown(name, level, error) from None


def _not_shown(name: str, level: int, why: Exception) -> ConfigError:
    return ConfigError(
        f"environment {name}: level {level} cannot be shown to a new model: {why}; "
        f"allowed: {'a lower level, or ' if level else ''}model.checkpoint without warm_start"
    )


def compacted(
    chat: TokenChat, task: Task, cfg: Rollouts, messages: Sequence[Message], summary: Callable[[], Reply]
) -> list[Example]:
    """A conversation of texts with summaries where a rollout would have them: an example for each of its branches."""
    conversation = Conversation(Rollout(task, 0), chat, cfg.model_copy(update={"system": ""}))

    def say(content: str) -> None:
        ids = chat.said(content)
        conversation.add(Segment(ids, is_sampled=True, logprobs=[0.0] * len(ids), versions=[0] * len(ids)))

    for is_reply, turn in groupby(messages, lambda one: one["role"] == "assistant"):
        if is_reply:
            say(next(turn)["content"])
            continue
        conversation.hear(list(turn))
        if conversation.needs_summary:
            conversation.ask_summary()
            say(summary().content)
            conversation.resume()
    rollout = replace(conversation.rollout, tree=conversation.rollout.tree.trained())
    sequences = sequences_of(rollout, 1.0, 1, "token-mean")
    return [(one.ids.tolist(), (one.columns["policy"] > 0).tolist()) for one in sequences]


@contextmanager
def shown_examples(recipe: RLRecipe, assets: Path) -> Iterator[Iterator[Example]]:
    """The warm start's conversations in tokens, without end. With several `workers` of the recipe, as many processes
    make the next ones meanwhile. `assets`: the folder of the tokenizer. TrainingError where one is killed."""
    where = recipe.model_dump_json(), assets
    if recipe.workers == 1:
        yield (example for first in count(0, AT_A_TIME) for example in _examples(where, first))
        return
    # Spawned: a process that has used a GPU must not fork.
    pool = ProcessPoolExecutor(recipe.workers, get_context("spawn"), _start_worker, (os.getpid(),))
    try:
        yield _in_order(pool, where, 2 * recipe.workers)
    except BrokenProcessPool:
        raise TrainingError("a process that makes conversations to show was killed (out of memory?)") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, where: tuple[str, Path], ahead: int) -> Iterator[Example]:
    coming: deque[Future[list[Example]]] = deque()
    for first in count(0, AT_A_TIME):
        coming.append(pool.submit(_examples, where, first))
        if len(coming) > ahead:
            yield from coming.popleft().result()


def _examples(where: tuple[str, Path], first: int) -> list[Example]:
    shown, chat = _shown(where)
    return shown.examples(chat, range(first, first + AT_A_TIME))


@lru_cache(maxsize=1)
def _shown(where: tuple[str, Path]) -> tuple[ShownGames, TokenChat]:
    text, assets = where
    recipe = RLRecipe.model_validate_json(text)
    environments = {one.name: make(one.name) for one in recipe.environment}
    template = ChatTemplate.for_checkpoint(assets, tokenizer=Tokenizer.from_dir(assets))
    chat = TokenChat(template, enable_thinking=recipe.rollouts.enable_thinking)
    return ShownGames(recipe, environments, TaskSource(recipe, environments)), chat


def _start_worker(parent: int) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
