"""What people see of a run: a line a step in metrics.jsonl, and on the terminal; TensorBoard and Weights & Biases."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from glm5.common.bounded import TABLES, read_bounded_text
from glm5.common.errors import TrainingError
from glm5.config.rl import RLRecipe
from glm5.rl.waits import PREDICTED
from glm5.train.metrics import FILE, StepLog

logger = logging.getLogger(__name__)

SHOWN = ("reward/mean", "entropy", "is/mask_frac", "kl/mismatch", "len/mean", "grad/norm", "perf/rollout_tok_s")
"""In a log's line of a step."""
_LEFT = (*SHOWN[:-1], "turns/mean", "group/dropped")
_RIGHT = ("eval/mean", "eval/pass@1", "time/rollout", "time/train", "time/push", "wait/trainer", SHOWN[-1], "perf/mfu")
"""Of the table on a terminal: with means, and without."""

LOW_ENTROPY, LOW_STEPS = 0.01, 5
"""Nats a token below which a policy hardly explores, and the steps in a row after which that is told."""


DIVERGED = 1.0
"""Of `divergence`: from which on, with a true reward below its first one, the proxy is said to be hacked."""
_BELIEVED = {"metric/proxy", "metric/true", "proxy/std", "true/std"}


def divergence(begun: Mapping[str, float], now: Mapping[str, float]) -> float:
    """The proxy's gain since the first step minus that of the true reward, each in standard deviations of the first
    step's rollouts (at least 1e-3). Gao et al. (arXiv 2210.10760) plot both over the distance from the start."""
    proxy, true = (
        (now[f"metric/{name}"] - begun[f"metric/{name}"]) / max(begun[f"{name}/std"], 1e-3)
        for name in ("proxy", "true")
    )
    return proxy - true


class Watch(StepLog):
    """The metrics of a run; lines that it repeats are those of steps after `first`, and at its beginning all."""

    def __init__(self, out: Path, recipe: RLRecipe, first: int, stream: TextIO | None = None) -> None:
        board = out / "tensorboard" if recipe.tensorboard else None
        config = json.loads(recipe.model_dump_json())
        wandb = {"project": "glm5-rl", "name": recipe.name, "config": config} if recipe.wandb else None
        about = {"title": recipe.name, "shown": SHOWN, "board": board, "wandb": wandb, "table": (_LEFT, _RIGHT)}
        super().__init__(out / FILE, recipe.name, recipe.steps, first, stream, **about)
        self._low_steps, self._has_warned = 0, False
        lines = [] if first == 0 else read_metrics(out)
        self._begun = next((line for line in lines if line.keys() >= _BELIEVED), None)
        self._has_diverged = False

    def kept(self) -> list[dict[str, Any]]:
        """The records that a run that goes on does not repeat."""
        return [line for line in read_lines(self._file) if 0 < self._first >= line["step"]]

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics after `step` steps."""
        if metrics.keys() >= _BELIEVED:
            self._begun = self._begun or dict(metrics)
            metrics = {**metrics, "proxy/divergence": divergence(self._begun, metrics)}
            self._watch_proxy(step, metrics)
        super().step(step, metrics)
        self._watch_entropy(step, metrics.get("entropy", LOW_ENTROPY))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of an evaluation after `step` steps."""
        self.write(step, metrics)
        if self._live is not None:
            self._live.held_out(metrics)
            return
        self.say(f"{self._name} {step}", metrics)

    def predicted(self, step: int, figures: Mapping[str, float]) -> None:
        """What was predicted of the run after `step` steps."""
        self.write(step, {PREDICTED + name: value for name, value in figures.items()})

    def _watch_proxy(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once of a proxy that rises while the true reward falls."""
        assert self._begun is not None
        fallen = metrics["metric/true"] < self._begun["metric/true"]
        if fallen and metrics["proxy/divergence"] >= DIVERGED and not self._has_diverged:
            self._has_diverged = True
            self.release()
            logger.warning(
                "step %d: the proxy has risen from %.3g to %.3g and the true reward fallen from %.3g to %.3g since the "
                "first step: what is rewarded is being hacked; give rules, a judge or guards more weight, or add "
                "anchors (docs/rl-general.md)",
                step,
                *(line[f"metric/{name}"] for name in ("proxy", "true") for line in (self._begun, metrics)),
            )

    def _watch_entropy(self, step: int, entropy: float) -> None:
        """Warn once of a policy that hardly explores."""
        self._low_steps = self._low_steps + 1 if entropy < LOW_ENTROPY else 0
        if self._low_steps == LOW_STEPS and not self._has_warned:
            self._has_warned = True
            self.release()
            logger.warning(
                "step %d: the entropy has been below %g nats a token for %d steps, now %.2g: the rollouts of a task "
                "are nearly alike, and little can be learnt from them; if the reward is not yet what it should be, "
                "raise algorithm.entropy or rollouts.temperature in a new run",
                step,
                LOW_ENTROPY,
                LOW_STEPS,
                entropy,
            )


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file of lines with a `step`, in order; a cut-off last line is left out."""
    found: list[Any] = []
    if file.exists():
        with suppress(ValueError, RecursionError):
            found.extend(json.loads(line) for line in read_bounded_text(file, TABLES, TrainingError).splitlines())
    steps = [line for line in found if isinstance(line, dict) and isinstance(line.get("step"), int)]
    return [line for line in steps if is_number(line["step"])]


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of the run in `out`, without what is no number: files may be damaged."""
    return [{name: one for name, one in line.items() if is_number(one)} for line in read_lines(out / FILE)]


def is_number(value: Any) -> bool:
    """Whether it is a number that a float or 64 bits hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
