"""The groups of a step, with others in place of those that are dropped."""

from collections.abc import Awaitable, Callable, Sequence

from glm5.common.errors import TrainingError
from glm5.rl.rollout import Group
from glm5.rl.rollouts.collect import Draw
from glm5.rl.tasks import TaskSource
from glm5.rl.training.repair import num_dropped, repair

Play = Callable[[Sequence[Draw]], Awaitable[list[Group]]]


async def refilled(play: Play, tasks: TaskSource, step: int) -> list[Group]:
    """The groups that `play` makes of a step's draws. Dropped ones stay among them, to be counted; for each another is
    drawn, at most as many as the step has. Raises TrainingError where none can be trained on."""
    groups, num_replaced = list[Group](), 0
    draws = tasks.draws(step)
    at_most = len(draws)
    while draws:
        groups += await play(draws)
        missing = min(num_dropped(groups), at_most)
        draws = tasks.replacements(step, range(num_replaced, missing))
        num_replaced = missing
    kept, repairs = repair(groups)
    if not kept:
        failed = (one for group in groups for one in group.rollouts if one.failure is not None)
        reason = next((one.failure_reason for one in failed), "no token was sampled")
        kinds = ", ".join(f"{number} {kind}" for kind, number in repairs.failures.items())
        raise TrainingError(
            f"none of {len(groups)} groups of rollouts can be trained on ({kinds}); the first failed by: {reason}"
        )
    return groups
