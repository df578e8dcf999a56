"""The teachers of a run, an engine each, of which one works at a time while the others sleep.

    for each teacher of a rollout of the step    wake up -> log-probabilities of what the policy sampled -> sleep
    at the same time                             the weights of the next one come back into their place

They score the tokens that the policy sampled as a prompt, at the temperature and over the vocabulary that each was
sampled with (GLM-5 report, section 3.5: log-probabilities of the inference engine). An engine starts when it is first
needed, and one that ends is started again with the next call.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from math import isfinite
from typing import Any

from glm5.common.errors import TrainingError
from glm5.config.rl import TeacherSection
from glm5.engine import AsyncEngine, SamplingParams
from glm5.rl.rollout import Group, Rollout
from glm5.rl.segments import SegmentTree


class Teachers:
    """`of`: the teacher of each environment, by the name that its tasks have. `make` builds an engine that has not
    started. `top_k`: how many of its likeliest tokens each reports. For one event loop."""

    def __init__(
        self, of: Mapping[str, TeacherSection], make: Callable[[TeacherSection], AsyncEngine], top_k: int = 0
    ) -> None:
        self._of, self._make, self._top_k = of, make, top_k
        self._engines = dict[str, AsyncEngine]()

    async def score(self, groups: Sequence[Group]) -> None:
        """Write into the rollouts of a step what their teachers say. Raises groups of EngineDead, after which all
        engines have ended, or of TrainingError."""
        work = dict[str, list[Rollout]]()
        for group in groups:
            if (teacher := self._of.get(group.task.environment)) is not None:
                work.setdefault(teacher.name, []).extend(one for one in group.rollouts if one.is_valid)
        order = [one for one in dict.fromkeys(one.name for one in self._of.values()) if work.get(one)]
        sections = {one.name: one for one in self._of.values()}
        try:
            for name, following in zip_longest(order, order[1:]):
                engine = await self._fetched(sections[name])
                await engine.wake_up()
                async with asyncio.TaskGroup() as together:
                    if following is not None:
                        together.create_task(self._fetched(sections[following]))
                    for rollout in work[name]:
                        together.create_task(self._judge(engine, name, rollout))
                await engine.sleep(sections[name].sleep_level)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all engines. Closing again does nothing."""
        engines, self._engines = self._engines, {}
        await asyncio.gather(*(asyncio.to_thread(engine.close) for engine in engines.values()))

    async def _fetched(self, teacher: TeacherSection) -> AsyncEngine:
        """A teacher's engine, whose weights are in their place."""
        if teacher.name in self._engines:
            await self._engines[teacher.name].wake_up(["weights"])
        else:
            self._engines[teacher.name] = self._make(teacher)
            await asyncio.to_thread(self._engines[teacher.name].start)
        return self._engines[teacher.name]

    async def _judge(self, engine: AsyncEngine, name: str, rollout: Rollout) -> None:
        """Score all sampled segments of a rollout, each once, on one of the paths that have it."""
        rollout.teacher, scored = name, set[int]()
        for leaf in rollout.tree.leaves():
            path = rollout.tree.path(leaf)
            new = [index for index in path if rollout.tree.segments[index].is_sampled and index not in scored]
            if new:
                scored.update(new)
                await self._score(engine, name, rollout, path[: path.index(new[-1]) + 1], new)

    async def _score(
        self, engine: AsyncEngine, name: str, rollout: Rollout, path: Sequence[int], new: Sequence[int]
    ) -> None:
        tree, top_k = rollout.tree, self._top_k
        ids, options = tree.token_ids(path[-1]), _masks(tree, path)
        given: Any = {"temperature": rollout.temperature, "prompt_logprobs": top_k, "max_tokens": 1}
        params = SamplingParams(detokenize=False, output_kind="FINAL_ONLY", **given)
        async with engine.generate(ids, params, **options) as deltas:
            entries = [entry async for delta in deltas for entry in delta.prompt_logprobs or ()]
        if len(entries) != len(ids) - 1:
            raise TrainingError(f"teacher {name}: it scored {len(entries)} of {len(ids) - 1} tokens")
        first = 0
        for index in path:
            segment = tree.segments[index]
            last = first + len(segment.token_ids)
            if index in new:
                rows = entries[first - 1 : last - 1]
                found = [row[token].tempered or 0.0 for row, token in zip(rows, segment.token_ids, strict=True)]
                if not all(map(isfinite, found)):
                    raise TrainingError(f"teacher {name}: a log-probability is not finite; its checkpoint is damaged")
                segment.teacher_logprobs = found
                segment.teacher_top = [_likeliest(row, top_k) for row in rows] if top_k else []
            first = last


def _likeliest(row: Mapping[int, Any], top_k: int) -> list[tuple[int, float]]:
    """The likeliest tokens of a place with their log-probabilities, without those that could not be sampled."""
    return [
        (token, one.tempered)
        for token, one in sorted(row.items(), key=lambda item: item[1].rank)
        if one.rank <= top_k and isfinite(one.tempered)
    ]


def _masks(tree: SegmentTree, path: Sequence[int]) -> dict[str, Any]:
    """The option of a request that says over which vocabulary each token but the first was sampled, if recorded."""
    segments = [tree.segments[index] for index in path]
    masks = [mask for one in segments for mask in one.kept or [b""] * len(one.token_ids)]
    return {"prompt_masks": tuple(masks[1:])} if any(masks) else {}
