"""`glm5 rl replay`: a training step again, from its record, to the same weights.

    a saved state before the step  ->  training on the recorded rollouts of each step since then  ->  sums of weights

Nothing is sampled: tokens, log-probabilities, versions and rewards are the recorded ones. On a CPU, and on a GPU in
deterministic mode, the weights are the same to the bit; where they are not, it is said which tensors differ, and which
token's log-probability first.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import DataError, TrainingError
from glm5.config.refusal import first_error
from glm5.config.rl import RLRecipe
from glm5.rl.build import PolicyBuilder
from glm5.rl.records.digest import digests
from glm5.rl.records.store import Records, read_groups, spans
from glm5.rl.records.trace import StepColumns
from glm5.rl.state import RunState
from glm5.rl.trainer import PolicyTrainer, arithmetic
from glm5.train.stage_trainer import device_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Difference:
    """What differs after a step: names of tensors, of all that were compared, and the place of the first token whose
    log-probability in training is another, with both; empty where none is."""

    step: int
    tensors: Sequence[str]
    num_compared: int
    token: str

    def __str__(self) -> str:
        if not self.tensors:
            return f"step {self.step}: equal, all {self.num_compared} tensors to the bit"
        named = ", ".join(self.tensors[:3]) + (", ..." if len(self.tensors) > 3 else "")
        places = f"; {self.token}" if self.token else "; every token's log-probability is equal"
        return f"step {self.step}: {len(self.tensors)} of {self.num_compared} tensors differ: {named}{places}"


def replay(out: Path, step: int) -> Iterator[Difference]:
    """Redo the training of `step` (from 1) of the run in `out`; yields a `Difference` for each step from the state on.

    Raises DataError and TrainingError where records or states are missing or damaged.
    """
    recipe, records = _recipe(out), Records(out)
    state = RunState(out, recipe)
    head = records.head(step)
    files = {number: path for number, path in records.states().items() if number < step}
    if not files:
        raise TrainingError(
            f"{out}: no state from before step {step} is kept (there are those after steps "
            f"{spans(sorted(records.states()))}); records.state_every and records.max_gb say how many are"
        )
    first = max(files)
    if missing := sorted(set(range(first + 1, step)) - set(records.steps())):
        raise TrainingError(
            f"{out}: from the state after step {first} to step {step}, the records of {spans(missing)} are missing; "
            "records.every = 1 keeps every step's"
        )
    device = device_of(recipe.device)
    recipe = recipe.model_copy(update={"steps": head.steps})  # the learning rate depends on it, and it may be changed
    with arithmetic(recipe, device):
        trainer = PolicyTrainer(recipe, PolicyBuilder(recipe, out), device)
        trainer.load_state(state.read_file(files[first])["trainer"])
        logger.info("training goes on from the state after step %d", first)
        if (ranks := len(recipe.trainer.devices)) > 1:
            logger.warning("%d processes trained the run and one repeats it: its sums differ a little", ranks)
        for number in range(first + 1, step + 1):
            yield _redo(trainer, records, number)


def _redo(trainer: PolicyTrainer, records: Records, step: int) -> Difference:
    groups, recorded = read_groups(records, step), records.head(step).weights
    scores = trainer.train(groups, step - 1).scores
    weights = digests(trainer.learnt())
    differing = [name for name in {**recorded, **weights} if weights.get(name) != recorded.get(name)]
    token = next(_other_logprobs(records, step, scores.by_segment(groups)), "") if differing else ""
    return Difference(step, differing, len(weights), token)


def _other_logprobs(records: Records, step: int, columns: StepColumns) -> Iterator[str]:
    """Places of tokens whose log-probability in training is not the recorded one."""
    for traces, of_group in zip(records.groups(step), columns, strict=True):
        for trace, of_rollout in zip(traces, of_group, strict=True):
            for number, (node, of) in enumerate(zip(trace.nodes, of_rollout, strict=True)):
                was, now = node.trainer_logprobs or [], [] if of is None else of["trainer_logprobs"]
                for at, (old, new) in enumerate(zip(was, now, strict=False)):
                    if old != new:
                        yield f"the first other log-probability: {trace.id}, segment {number}, token {at}: {old}, {new}"


def _recipe(out: Path) -> RLRecipe:
    file = out / "recipe.json"
    try:
        values = json.loads(read_bounded_text(file, SETTINGS, DataError))
        return RLRecipe.model_validate(values).model_copy(update={"out": str(out)})
    except ValidationError as error:
        path, value, allowed = first_error(error)
        raise DataError(f"{file}: {'.'.join(path)}: got {value!r:.80}; allowed: {allowed}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: no recipe of a run: {error}") from None
