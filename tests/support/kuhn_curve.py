"""How far a self-play run of Kuhn poker is from equilibrium: `python -m tests.support.kuhn_curve FOLDER`.

The policy of a step is read from its records: the probability of a reply at an information set is the exponential of
the log-probabilities of its tokens. An information set that no game of a step reached keeps its last probability.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from glm5.rl.environments.kuhn import INFORMATION_SETS, conversation, nash_conv
from glm5.rl.records.store import Records
from glm5.rl.records.trace import Trace

_NAMES = {repr(conversation(each)): each for each in INFORMATION_SETS}


def policies(out: Path) -> list[dict[str, float]]:
    """For each step of a run the probability of a bet at each information set, among legal replies."""
    records, played = Records(out), [dict.fromkeys(INFORMATION_SETS, 0.5)]
    for step in records.steps():
        said = dict[tuple[str, str], float]()
        for traces in records.groups(step):
            for trace in traces:
                said |= _probabilities(trace)
        known = {name: _bet(said.get((name, "bet")), said.get((name, "pass"))) for name in INFORMATION_SETS}
        played.append(played[-1] | {name: bet for name, bet in known.items() if bet is not None})
    return played[1:]


def average(played: Sequence[dict[str, float]]) -> dict[str, float]:
    """The policy that plays as one of these, drawn anew for each game: at an information set, each counts by how
    likely its own earlier action is to lead there (Heinrich, Lanctot and Silver 2015, section 3)."""
    found = dict[str, float]()
    for name in INFORMATION_SETS:
        weights = [1 - each[name[0]] if len(name) == 3 else 1.0 for each in played]
        total = sum(weight * each[name] for weight, each in zip(weights, played, strict=True))
        found[name] = total / max(sum(weights), 1e-12)
    return found


def distances(out: Path) -> tuple[float, float]:
    """NashConv / 2 of the average over the later half of a run's steps, and of the last step."""
    played = policies(out)
    return nash_conv(average(played[len(played) // 2 :])) / 2, nash_conv(played[-1]) / 2


def _probabilities(trace: Trace) -> dict[tuple[str, str], float]:
    """Of a rollout's replies: by information set and reply."""
    replies, messages = (node for node in trace.nodes if node.sampled), trace.info.messages
    found = dict[tuple[str, str], float]()
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            heard = _NAMES[repr(messages[:number])]
            found[heard, message["content"].strip()] = math.exp(sum(next(replies).logprobs))
    return found


def _bet(bet: float | None, passed: float | None) -> float | None:
    """The share of a bet; of a reply that was not sampled, the probability is what the other one leaves."""
    if bet is None and passed is None:
        return None
    bet = 1 - (passed or 0.0) if bet is None else bet
    return bet / (bet + (1 - bet if passed is None else passed))


def main() -> None:
    out = Path(sys.argv[1])
    played = policies(out)
    for step in range(9, len(played), 10):
        of_average = nash_conv(average(played[(step + 1) // 2 : step + 1])) / 2
        print(f"step {step + 1}: NashConv/2 {nash_conv(played[step]) / 2:.3f}, average {of_average:.3f}")
    print("last: " + ", ".join(f"{name} {bet:.2f}" for name, bet in played[-1].items()))
    print("NashConv/2: average of the later half {:.4f}, last {:.4f}".format(*distances(out)))


if __name__ == "__main__":
    main()
