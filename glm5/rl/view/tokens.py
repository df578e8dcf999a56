"""A conversation as HTML, each sampled token coloured by what the engine or the trainer computed of it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from glm5.chat.tokenizer import Tokenizer
from glm5.rl.records.trace import Node, Trace
from glm5.rl.view.render import render

MAX_TOKENS = 20_000
"""Of a page."""
_CONTROLS = {code: chr(0x2400 + code) for code in range(32)} | {10: "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n"}
_EDGES = (0.001, 0.01, 0.1, 0.3)  # of |log ratio|: rounding, another arithmetic, a step of training, a masked token


@dataclass(frozen=True)
class Token:
    """A sampled token: what is known of it; None where it was not trained. `masked`: left out by the algorithm."""

    logprob: float
    version: int
    trainer: float | None
    advantage: float | None
    weight: float | None
    entropy: float | None
    masked: bool | None
    teacher: float | None = None

    @property
    def ratio(self) -> float | None:
        """Probability by the trainer / by the engine."""
        return None if self.trainer is None else math.exp(min(self.trainer - self.logprob, 700.0))

    def facts(self) -> str:
        """All that is known, in a line for each."""
        values = {
            "log-probability": self.logprob,
            "trainer's": self.trainer,
            "ratio": self.ratio,
            "teacher's": self.teacher,
            "advantage": self.advantage,
            "weight": self.weight,
            "entropy": self.entropy,
        }
        lines = [f"{name} {value:.6g}" for name, value in values.items() if value is not None]
        state = "not trained" if self.masked is None else "masked" if self.masked else "trained"
        return "\n".join([*lines, f"weights of version {self.version}", state])


def _within(value: float, most: int) -> float:
    """From 0 to `most`; 0 for what is no number."""
    return min(float(most), max(0.0, value))


def _of_logprob(token: Token, _largest: float) -> str:
    return f"q{int(_within(-token.logprob / 0.7, 5))}"


def _of_ratio(token: Token, _largest: float) -> str:
    if token.trainer is None:
        return ""
    difference = token.trainer - token.logprob
    return f"{'n' if difference < 0 else 'p'}{sum(abs(difference) > edge for edge in _EDGES)}"


def _of_advantage(token: Token, largest: float) -> str:
    if token.advantage is None:
        return ""
    share = 4 * (abs(token.advantage) / largest) if largest else token.advantage
    return f"{'n' if token.advantage < 0 else 'p'}{math.ceil(_within(share, 4))}"


def _of_mask(token: Token, _largest: float) -> str:
    return "" if token.masked is None else "masked" if token.masked else "p3"


COLOURS: dict[str, tuple[Callable[[Token, float], str], str]] = {
    "log-probability": (_of_logprob, "the darker, the less likely: 1, 0.5, 0.25, 0.12, 0.06, 0.03 and less"),
    "ratio": (_of_ratio, "of the trainer's probability to the engine's: red below 1, green above"),
    "advantage": (_of_advantage, "red below 0, green above; the darkest is the group's largest"),
    "mask": (_of_mask, "green: trained; struck out: masked by the algorithm; without colour: not trained"),
}
"""By name: the class of a token (its second argument is the group's largest |advantage|), and a legend."""


def conversation(trace: Trace, tokenizer: Tokenizer, colour: str, largest: float, first: int) -> str:
    """The segments of a rollout from token `first` on, at most MAX_TOKENS."""
    text, shown, begin = _texts(tokenizer), list[dict[str, object]](), 0
    for number, node in enumerate(trace.nodes):
        start, stop = max(first - begin, 0), min(first + MAX_TOKENS - begin, len(node.token_ids))
        begin += len(node.token_ids)
        if start >= stop:
            continue
        context = "" if node.sampled else "".join(map(text, node.token_ids[start:stop]))
        tokens = tokens_of(node, start, stop) if node.sampled else ()
        sampled = [(text(node.token_ids[at]), token) for at, token in tokens]
        shown.append({"number": number, "node": node, "context": context, "sampled": sampled})
    return render("conversation", segments=shown, paint=COLOURS[colour][0], largest=largest)


def tokens_of(node: Node, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Token]]:
    """The tokens of a sampled segment, by their places in it. Records that are too short leave gaps."""
    weights = (node.loss_weights or {}).get("policy")
    columns = (node.trainer_logprobs, node.advantages, weights, node.entropies, node.masked)
    count = min(len(node.token_ids), len(node.logprobs), len(node.versions))
    for at in range(start, count if stop is None else min(stop, count)):
        trainer, advantage, weight, entropy, masked = (
            one[at] if one is not None and at < len(one) else None for one in columns
        )
        teacher = node.teacher_logprobs[at] if at < len(node.teacher_logprobs) else None
        yield at, Token(node.logprobs[at], node.versions[at], trainer, advantage, weight, entropy, masked, teacher)  # pyright: ignore[reportArgumentType]


def largest_advantage(traces: list[Trace]) -> float:
    """The largest finite absolute value of a group."""
    found = (abs(one) for trace in traces for node in trace.nodes for one in node.advantages or ())
    return max(filter(math.isfinite, found), default=0.0)


def _texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    @lru_cache(maxsize=2**16)
    def text(token_id: int) -> str:
        found = tokenizer.decode([token_id]) if token_id < tokenizer.vocab_size else f"[{token_id}]"
        return found.translate(_CONTROLS)

    return text
