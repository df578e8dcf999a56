"""How far a self-play run of Kuhn poker is from equilibrium: `python -m tests.support.kuhn_curve FOLDER`.

The policy of a step is read from its records: the probability of a reply at an information set is the exponential of
the log-probabilities of its tokens. An information set that no game of a step reached keeps its last probability.

    NashConv(policy) = max_a value_0(a, policy) - min_b value_0(policy, b)

is what both seats would gain by best responses: 0 in equilibrium. A policy is the probability of a bet at each of the
12 information sets, which are named by the card and the history: "K", "Kp", "Kb", "Kpb", ...
"""

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from glm5.rl.environments.kuhn import CARDS, DEALS, ENDS, WORDS, asked, won_by_first
from glm5.rl.environments.protocol import Message
from glm5.rl.records.store import Records
from glm5.rl.records.trace import Trace

SETS = tuple([card + history for history in of_seat for card in CARDS] for of_seat in (("", "pb"), ("p", "b")))
"""By seat: the information sets where it acts."""
INFORMATION_SETS = (*SETS[0], *SETS[1])
GAME_VALUE = -1 / 18
Policy = Mapping[str, float]
"""Probability of a bet by information set."""


def value(policy_0: Policy, policy_1: Policy) -> float:
    """What seat 0 wins in the mean, when the seats play these policies."""
    return sum(_value(deal, "", (policy_0, policy_1)) for deal in DEALS) / len(DEALS)


def nash_conv(policy: Policy) -> float:
    """What best responses to `policy` win against it in both seats together. Exact: all pure responses are tried."""
    responses = [
        [dict(zip(SETS[seat], bets, strict=True)) for bets in product((0.0, 1.0), repeat=6)] for seat in (0, 1)
    ]
    return max(value(pure, policy) for pure in responses[0]) - min(value(policy, pure) for pure in responses[1])


def conversation(information_set: str) -> list[Message]:
    """What the policy reads at an information set: the prompt whose next reply is a bet or a pass."""
    card, history = information_set[0], information_set[1:]
    seat = len(history) % 2
    messages: list[Message] = [asked(card, history[:1] if seat else "")]
    if history == "pb":
        messages += [{"role": "assistant", "content": WORDS["p"]}, {"role": "user", "content": WORDS["b"]}]
    return messages


def _value(deal: tuple[str, ...], history: str, policies: tuple[Policy, Policy]) -> float:
    if history in ENDS:
        return won_by_first(deal, history)
    seat = len(history) % 2
    bet = policies[seat][deal[seat] + history]
    return bet * _value(deal, history + "b", policies) + (1 - bet) * _value(deal, history + "p", policies)


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
