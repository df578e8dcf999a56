"""Kuhn poker in self-play: three cards, one bet, and the exact distance of a policy from equilibrium.

Both players put 1 into the pot and get one of the cards J < Q < K. Each in turn passes or bets 1; to pass after a bet
is to fold. Histories (p pass, b bet) end as pp (higher card wins 1), bp (the bettor wins 1), pbp (the second player
wins 1), bb and pbb (higher card wins 2). In equilibrium the first player (seat 0) loses 1/18 a game (Kuhn 1950).

    NashConv(policy) = max_a value_0(a, policy) - min_b value_0(policy, b)

is what both seats would gain by best responses: 0 in equilibrium. A policy is the probability of a bet at each of the
12 information sets, which are named by the card and the history: "K", "Kp", "Kb", "Kpb", ...
"""

from collections.abc import Mapping, Sequence
from itertools import permutations, product
from random import Random

from glm5.rl.environments.protocol import Episode, Message, Playable, Reply, Task, Turn

CARDS = "JQK"
DEALS = tuple(permutations(CARDS, 2))
WORDS = {"p": "pass", "b": "bet"}
ACTIONS = {word: letter for letter, word in WORDS.items()}
ENDS = {"pp": (1, None), "bp": (1, 0), "pbp": (1, 1), "bb": (2, None), "pbb": (2, None)}
"""By history: what is won, and the seat that wins it (None: the higher card)."""
SETS = tuple([card + history for history in of_seat for card in CARDS] for of_seat in (("", "pb"), ("p", "b")))
"""By seat: the information sets where it acts."""
INFORMATION_SETS = (*SETS[0], *SETS[1])
GAME_VALUE = -1 / 18
ILLEGAL = -2.0
"""Reward of a reply that is no action, as low as the worst loss. The other seat gets nothing."""

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
    messages: list[Message] = [_asked(card, history[:1] if seat else "")]
    if history == "pb":
        messages += [{"role": "assistant", "content": WORDS["p"]}, {"role": "user", "content": WORDS["b"]}]
    return messages


def _value(deal: tuple[str, ...], history: str, policies: tuple[Policy, Policy]) -> float:
    if history in ENDS:
        return won_by_first(deal, history)
    seat = len(history) % 2
    bet = policies[seat][deal[seat] + history]
    return bet * _value(deal, history + "b", policies) + (1 - bet) * _value(deal, history + "p", policies)


def won_by_first(deal: Sequence[str], history: str) -> float:
    """What seat 0 wins at the end of a game."""
    won, winner = ENDS[history]
    return won if winner == 0 or (winner is None and _is_higher(deal)) else -won


def _is_higher(deal: Sequence[str]) -> bool:
    return CARDS.index(deal[0]) > CARDS.index(deal[1])


def _asked(card: str, history: str) -> Message:
    return {"role": "user", "content": " ".join([f"Card {card}", *(WORDS[letter] for letter in history)])}


class Kuhn(Playable):
    """Seeds 0 to 5 are the six deals, and so on in turn. Rewards are what each seat wins, from -2 to 2."""

    name, num_turns, num_seats, is_quick = "kuhn", 3, 2, True

    def task(self, seed: int, level: int) -> Task:
        deal = DEALS[seed % len(DEALS)]
        return Task(self.name, seed, level, (_asked(deal[0], ""),), {"deal": list(deal)})

    def reset(self, task: Task) -> "KuhnEpisode":
        return KuhnEpisode(task)

    def oracle(self, task: Task) -> Sequence[Reply]:
        """As if both seats saw both cards: the higher card bets, the lower passes."""
        return [Reply(word) for word in (["bet", "pass"] if _is_higher(task.data["deal"]) else ["pass", "bet", "pass"])]

    def random_reply(self, task: Task, random: Random, asked: str) -> Reply:
        return Reply(random.choice(list(ACTIONS)))


class KuhnEpisode(Episode):
    """One game."""

    def __init__(self, task: Task) -> None:
        self.messages = task.messages
        self._deal: list[str] = task.data["deal"]
        self._history = ""

    def step(self, reply: Reply) -> Turn:
        seat, action = len(self._history) % 2, ACTIONS.get(reply.content.strip())
        if action is None:
            rewards = (ILLEGAL, 0.0) if seat == 0 else (0.0, ILLEGAL)
            return _end(rewards, is_illegal=True)
        self._history += action
        if self._history in ENDS:
            won = float(won_by_first(self._deal, self._history))
            return _end((won, -won), is_illegal=False)
        other = 1 - seat
        told = _asked(self._deal[1], action) if other == 1 else {"role": "user", "content": WORDS[action]}
        return Turn((told,), seat=other)


def _end(rewards: tuple[float, float], *, is_illegal: bool) -> Turn:
    won, other = ({"won": reward} for reward in rewards)
    return Turn(is_done=True, rewards=won, seat_rewards=(other,), metrics={"illegal": float(is_illegal)})
