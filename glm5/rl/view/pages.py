"""The pages of a run: curves and steps; a step's groups by reward; a group's rollouts, one of them token by token."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.rl.records.store import Head, Records
from glm5.rl.records.trace import Trace
from glm5.rl.report import comparison, plots, services, table
from glm5.rl.view.rate import LETTERS, Ratings
from glm5.rl.view.render import address, render
from glm5.rl.view.timeline import timeline
from glm5.rl.view.tokens import COLOURS, MAX_TOKENS, conversation, largest_advantage
from glm5.rl.view.tree import tree
from glm5.rl.watch import read_metrics

MAX_GROUPS, MAX_CHIPS = 500, 64
"""Of a page, and rollouts of a row in it."""
Query = Mapping[str, str]


class NoPage(Exception):
    """There is no page at that address."""


class RunPages:
    """The pages of the run in `out`, written anew for each request: the run may be going on."""

    def __init__(self, out: Path) -> None:
        self.out, self.records, self.ratings = out, Records(out), Ratings(out)
        self._tokenizer: Tokenizer | None = None

    def page(self, path: Sequence[str], query: Query) -> str:
        """The page at /path?query. Raises NoPage, and DataError where records cannot be read."""
        match list(path):
            case []:
                return self._run()
            case ["steps", step]:
                return self._step(_number(step), _number(query.get("first", "0")))
            case ["steps", step, "groups", group]:
                return self._group(_number(step), _number(group), query)
            case ["rate", step, place]:
                return self._rate(_number(step), _number(place))
            case _:
                raise NoPage

    def _rate(self, step: int, place: int) -> str:
        total = len(self._known(step).groups)
        pairs = ((number, self.ratings.pair(step, number)) for number in range(place, total))
        place, found = next(((number, pair) for number, pair in pairs if pair is not None), (total, None))
        if found is None:
            return render("message", text="That was the last group of this step. Verdicts are in the run's ratings/.")
        prompt, replies = found
        values = {"path": f"/rate/{step}/{place}", "place": place, "total": total, "token": self.ratings.token}
        crumbs = [(f"/steps/{step}", f"step {step}"), ("", "compare")]
        return self._page("rate", crumbs, prompt=prompt, replies=list(zip(LETTERS, replies, strict=True)), **values)

    def rate(self, path: Sequence[str], form: Query) -> str:
        """Keep a verdict; returns the next page's path. Raises NoPage, and ValueError for a form of another page."""
        match list(path):
            case ["rate", step, place]:
                self._known(_number(step))
                self.ratings.rate(_number(step), _number(place), form)
                return f"/rate/{step}/{_number(place) + 1}"
            case _:
                raise NoPage

    def _run(self) -> str:
        lines = read_metrics(self.out)
        rewards = {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}
        curves = plots(lines, max((line["step"] for line in lines), default=1))
        figures = table(lines) + services(lines) + comparison(lines) + timeline(lines)
        return self._page("run", [], steps=self.records.steps(), rewards=rewards, figures=figures, plots=curves)

    def _step(self, step: int, first: int) -> str:
        groups = self._known(step).groups
        means = [_mean(one.rewards) for one in groups]
        shown = [(index, groups[index], means[index]) for index in by_reward(means)[first : first + MAX_GROUPS]]
        path, sizes = f"/steps/{step}", {"max_groups": MAX_GROUPS, "max_chips": MAX_CHIPS, "total": len(groups)}
        return self._page(
            "step", [(path, f"step {step}")], path=path, groups=shown, by_reward=by_reward, first=first, **sizes
        )

    def _group(self, step: int, index: int, query: Query) -> str:
        if not index < len(self._known(step).groups):
            raise NoPage
        traces = self.records.group(step, index)
        colour, first = query.get("colour", "log-probability"), _number(query.get("first", "0"))
        rewards = [one.reward if one.ok else None for one in traces]
        order = by_reward(rewards)
        chosen = _number(query.get("rollout", str(order[0] if order else 0)))
        if colour not in COLOURS or chosen >= len(traces):
            raise NoPage
        here, trace = f"/steps/{step}/groups/{index}", traces[chosen]

        def place(segment: int, token: int) -> str:
            page = address(here, rollout=chosen, colour=colour, first=token - token % MAX_TOKENS)
            return f"{page}#segment-{segment}"

        return self._page(
            "group",
            [(f"/steps/{step}", f"step {step}"), (here, f"group {index}"), ("", f"rollout {chosen}")],
            path=here,
            order=order,
            rewards=rewards,
            chosen=chosen,
            facts=_facts(trace),
            tree=tree(trace, place),
            colours=COLOURS,
            colour=colour,
            conversation=conversation(trace, self._text(), colour, largest_advantage(traces), first),
            first=first,
            max_tokens=MAX_TOKENS,
            total=sum(len(node.token_ids) for node in trace.nodes),
        )

    def _known(self, step: int) -> Head:
        if not self.records.path(step).exists():
            raise NoPage
        return self.records.head(step)

    def _text(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_dir(self.out / "policy")
        return self._tokenizer

    def _page(self, template: str, crumbs: Sequence[tuple[str, str]], **values: Any) -> str:
        return render(template, name=self.out.resolve().name, crumbs=crumbs, **values)


def by_reward(rewards: Sequence[float | None]) -> list[int]:
    """Places of rewards, the highest first; those of failed rollouts (None), and those that are no number, last."""
    known = [math.nan if reward is None else reward for reward in rewards]
    return sorted(range(len(known)), key=lambda at: (math.isnan(known[at]), -known[at], at))


def _facts(trace: Trace) -> dict[str, str]:
    sampled = sum(len(node.token_ids) for node in trace.nodes if node.sampled)
    return {
        "reward": f"{trace.reward:.4g}" if trace.ok else "none",
        **{f"reward, {name}": f"{one.score:.4g}" for name, one in trace.rewards.items() if len(trace.rewards) > 1},
        "turns": f"{trace.info.num_turns}",
        "sampled tokens": f"{sampled:,}",
        "ended": trace.stop_condition,
        **{name: f"{math.nan if value is None else value:.4g}" for name, value in trace.metrics.items()},
        **{f"{one.type} failed": one.message for one in trace.errors},
        "environment": trace.task.type,
        "task": f"{trace.task.key}, level {trace.task.data.level}",
        "temperature": f"{trace.info.temperature:g}",
    }


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [one for one in rewards if one is not None]
    return sum(known) / len(known) if known else None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise NoPage
    return int(text)
