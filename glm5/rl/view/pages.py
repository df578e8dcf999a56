"""The pages of a run: curves and steps; a step's groups by reward; a group's rollouts, one of them token by token."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode

from glm5.chat.tokenizer import Tokenizer
from glm5.rl.records.store import GroupHead, Head, Records
from glm5.rl.records.trace import Trace
from glm5.rl.report import comparison, plots, services, table
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
        self.out, self.records = out, Records(out)
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
            case _:
                raise NoPage

    def _run(self) -> str:
        lines = read_metrics(self.out)
        rewards = {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}
        chips = [_chip(f"/steps/{step}", f"{step}", rewards.get(step)) for step in self.records.steps()]
        total = max((line["step"] for line in lines), default=1)
        kept = f"<h2>Steps</h2><p>{''.join(chips) or 'No rollouts are kept.'}</p>"
        curves = "".join(f'<div class="card">{figure}</div>' for figure in plots(lines, total))
        said = f"{kept}{table(lines)}{services(lines)}{comparison(lines)}{timeline(lines)}"
        return self._page([], f'{said}<h2>Curves</h2><div class="curves">{curves}</div>')

    def _step(self, step: int, first: int) -> str:
        groups = list(enumerate(self._known(step).groups))
        groups.sort(key=lambda one: (-_known_reward(_mean(one[1].rewards)), one[0]))
        rows = "".join(_row(step, index, group) for index, group in groups[first : first + MAX_GROUPS])
        more = _more(f"/steps/{step}", {}, first, MAX_GROUPS, len(groups), "groups")
        heads = ("group", "environment", "level", "task", "mean reward", "rollouts, by reward")
        head = "".join(f"<th>{name}</th>" for name in heads)
        return self._page([(f"/steps/{step}", f"step {step}")], f"<table><tr>{head}</tr>{rows}</table>{more}")

    def _group(self, step: int, index: int, query: Query) -> str:
        if not index < len(self._known(step).groups):
            raise NoPage
        traces = self.records.group(step, index)
        colour, first = query.get("colour", "log-probability"), _number(query.get("first", "0"))
        order = sorted(range(len(traces)), key=lambda number: (-_known_reward(traces[number].reward), number))
        chosen = _number(query.get("rollout", str(order[0] if order else 0)))
        if colour not in COLOURS or chosen >= len(traces):
            raise NoPage
        here, trace = f"/steps/{step}/groups/{index}", traces[chosen]
        chips = "".join(
            _chip(
                f"{here}?{urlencode({'rollout': number, 'colour': colour})}",
                f"{number}",
                traces[number].reward if traces[number].ok else None,
                is_here=number == chosen,
            )
            for number in order
        )
        choices = "".join(
            _link(f"{here}?{urlencode({'rollout': chosen, 'colour': name})}", name, "choice", is_here=name == colour)
            for name in COLOURS
        )
        count = sum(len(node.token_ids) for node in trace.nodes)
        more = _more(here, {"rollout": str(chosen), "colour": colour}, first, MAX_TOKENS, count, "tokens")
        shape = tree(
            trace,
            lambda number, token: (
                f"{here}?{urlencode({'rollout': chosen, 'colour': colour, 'first': token - token % MAX_TOKENS})}"
                f"#segment-{number}"
            ),
        )
        said = conversation(trace, self._text(), colour, largest_advantage(traces), first)
        body = (
            f'<p>{chips}</p>{_facts(trace)}{shape}<nav aria-label="Colour of tokens">{choices}</nav>'
            f'<p class="muted" id="legend">{html.escape(COLOURS[colour][1])}. Point at a token for all figures.</p>'
            f'<div id="conversation">{said}</div>{more}'
        )
        crumbs = [(f"/steps/{step}", f"step {step}"), (here, f"group {index}"), ("", f"rollout {chosen}")]
        return self._page(crumbs, body)

    def _known(self, step: int) -> Head:
        if not self.records.path(step).exists():
            raise NoPage
        return self.records.head(step)

    def _text(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_dir(self.out / "policy")
        return self._tokenizer

    def _page(self, crumbs: Sequence[tuple[str, str]], body: str) -> str:
        name = html.escape(self.out.resolve().name)
        path = "".join(
            f' <span class="muted">/</span> <a href="{address}">{text}</a>' if address else f" / {text}"
            for address, text in crumbs
        )
        title = ", ".join([name, *(text for _, text in crumbs)])
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            'content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
            f'<title>{title}</title><link rel="icon" href="/page/icon.svg" type="image/svg+xml">'
            '<link rel="stylesheet" href="/page/base.css"><link rel="stylesheet" href="/page/view.css"></head>'
            f'<body><header><img src="/page/icon.svg" alt="" width="24" height="24"/><h1><a href="/">{name}</a>{path}'
            f"</h1></header><main>{body}</main></body></html>\n"
        )


def message_page(text: str) -> str:
    """A page that says what is wrong."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>glm5 rl view</title>'
        '<link rel="stylesheet" href="/page/base.css"><link rel="stylesheet" href="/page/view.css"></head>'
        f'<body><main><p class="error">{html.escape(text)}</p><p><a href="/">The run</a></p></main></body></html>\n'
    )


def _row(step: int, index: int, group: GroupHead) -> str:
    here = f"/steps/{step}/groups/{index}"
    order = sorted(range(len(group.rewards)), key=lambda number: (-_known_reward(group.rewards[number]), number))
    chips = "".join(
        _chip(f"{here}?{urlencode({'rollout': number})}", f"{number}", group.rewards[number])
        for number in order[:MAX_CHIPS]
    )
    more = f" and {len(order) - MAX_CHIPS:,} more" if len(order) > MAX_CHIPS else ""
    mean = "" if all(one is None for one in group.rewards) else f"{_mean(group.rewards):.3g}"
    cells = (
        _link(here, f"{index}", "chip"),
        html.escape(group.environment),
        group.level,
        group.seed,
        mean,
        chips + more,
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _facts(trace: Trace) -> str:
    sampled = sum(len(node.token_ids) for node in trace.nodes if node.sampled)
    found: dict[str, str] = {
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
    items = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in found.items())
    return f'<dl class="facts card">{items}</dl>'


def _chip(address: str, text: str, reward: float | None, *, is_here: bool = False) -> str:
    kind = "none" if reward is None else f"r{round(min(4.0, max(0.0, 4 * reward)))}"
    shown = "failed" if reward is None else f"{reward:.3g}"
    return _link(address, f"{text} <span>{shown}</span>", f"chip {kind}", is_here=is_here)


def _link(address: str, content: str, kind: str, *, is_here: bool = False) -> str:
    here = ' aria-current="true"' if is_here else ""
    return f'<a class="{kind}" href="{html.escape(address)}"{here}>{content}</a> '


def _more(address: str, query: Query, first: int, size: int, total: int, what: str) -> str:
    """Links to the other parts of a long list; empty for a short one."""
    if total <= size and not first:
        return ""
    parts = [
        _link(f"{address}?{urlencode({**query, 'first': start})}", f"{start:,}", "chip", is_here=start == first)
        for start in range(0, total, size)
    ]
    return f"<p>{what.capitalize()} from {''.join(parts)}of {total:,}</p>"


def _known_reward(reward: float | None) -> float:
    return float("-inf") if reward is None or math.isnan(reward) else reward


def _mean(rewards: Sequence[float | None]) -> float:
    known = [one for one in rewards if one is not None]
    return sum(known) / len(known) if known else float("-inf")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise NoPage
    return int(text)
