"""Worker process that runs episodes: `python -m glm5.rl.environments.worker`, started by `workers.py`.

It reads lines (`wire.py`) from standard input and answers on standard output; what environments print goes to standard
error. Several threads answer, so that episodes that wait for a sandbox do not hold up each other. It ends when its
input ends, which it also does when the parent dies.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

from glm5.common.errors import GlmError, reason_of
from glm5.rl.environments.boxes import NO_BOXES, Boxes
from glm5.rl.environments.protocol import Environment, Episode, EpisodeFailed, Reply
from glm5.rl.environments.table import make
from glm5.rl.environments.wire import TooLarge, as_json, as_task, frame
from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.sandbox import SandboxFailed

NUM_THREADS = 8
_MAX_REASON = 2000


class Worker:
    """The environments and open episodes of this process."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers, self._writing = answers, threading.Lock()
        self._environments: dict[str, Environment] = {}
        self.episodes: dict[int, Episode] = {}

    def answer(self, request: Mapping[str, Any]) -> None:
        """Answer one request; whatever it raises is a failure that the answer names."""
        number = {"id": request["id"]}
        try:
            answer = frame(number | self._result(request))
        except Exception as error:  # noqa: BLE001 - a value that JSON cannot hold, however that shows
            answer = frame(number | _failure(error))
        with self._writing, suppress(BrokenPipeError):
            self._answers.write(answer)
            self._answers.flush()

    def _result(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its value; whatever it raises is a failure that the answer names."""
        try:
            return {"value": getattr(self, f"_{request['op']}")(request)}
        except Exception as error:  # noqa: BLE001 - a bug of an environment is named to the run, which goes on
            return _failure(error)

    def _batch(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [self._result(one) for one in request["requests"]]

    def _start(self, request: Mapping[str, Any]) -> dict[str, list[Any]]:
        os.chdir(request["folder"])  # names of environments may be paths
        sys.path.extend(path for path in request["path"] if path not in sys.path)
        boxes = NO_BOXES if request["sandbox"] is None else Boxes.of(Backend(**request["sandbox"]))
        for name in request["names"]:
            environment = make(name, boxes)
            self._environments |= {name: environment, environment.name: environment}
        known = self._environments.items()
        scoring = [name for name, one in known if type(one).score_group is not Environment.score_group]
        levels = ((name, one, level) for name, one in known if one.is_quick for level in range(one.levels))
        quick = [(name, level) for name, one, level in levels if level not in one.sandbox_levels]
        beginning = [(name, level) for name, one in known if one.begins_quickly for level in range(one.levels)]
        return {"quick": quick, "beginning": [*quick, *beginning], "scoring": scoring}

    def _task(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return as_json(self._environments[request["name"]].task(request["seed"], request["level"]))

    def _reset(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        task = as_task(request["task"])
        return [self._result({"op": "begin", "task": task, "episode": number}) for number in request["episodes"]]

    def _begin(self, request: Mapping[str, Any]) -> list[Any]:
        task = request["task"]
        episode = self.episodes[request["episode"]] = self._environments[task.environment].reset(task)
        return list(episode.messages)

    def _step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        turn = self.episodes[request["episode"]].step(Reply(**request["reply"]))
        if turn.is_done:
            with suppress(Exception):
                self._close(request)
        return as_json(turn)

    def _close(self, request: Mapping[str, Any]) -> None:
        if (episode := self.episodes.pop(request["episode"], None)) is not None:
            episode.close()

    def _score_group(self, request: Mapping[str, Any]) -> list[float]:
        task = as_task(request["task"])
        return list(self._environments[task.environment].score_group(task, request["rewards"]))


def _failure(error: Exception) -> dict[str, Any]:
    kind = error.kind if isinstance(error, EpisodeFailed) else "environment"
    kind = "sandbox" if isinstance(error, SandboxFailed) else kind
    known = isinstance(error, EpisodeFailed | GlmError | SandboxFailed | TooLarge)
    return {"failed": [kind, (str(error) if known else reason_of(error))[:_MAX_REASON]]}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        worker, threads = Worker(answers), ThreadPoolExecutor(NUM_THREADS)
        for line in sys.stdin.buffer:
            threads.submit(worker.answer, json.loads(line))
        for episode in list(worker.episodes.values()):
            with suppress(Exception):
                episode.close()
    os._exit(0)  # not held up by a step that hangs


if __name__ == "__main__":
    main()
