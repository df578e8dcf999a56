"""Kuhn poker in self-play: three cards, one bet.

Both players put 1 into the pot and get one of the cards J < Q < K. Each in turn passes or bets 1; to pass after a bet
is to fold. Histories (p pass, b bet) end as pp (higher card wins 1), bp (the bettor wins 1), pbp (the second player
wins 1), bb and pbb (higher card wins 2). In equilibrium the first player (seat 0) loses 1/18 a game (Kuhn 1950).
"""

from collections.abc import Sequence
from itertools import permutations
from random import Random

from glm5.rl.environments.protocol import Episode, Message, Playable, Reply, Task, Turn

CARDS = "JQK"
DEALS = tuple(permutations(CARDS, 2))
WORDS = {"p": "pass", "b": "bet"}
ACTIONS = {word: letter for letter, word in WORDS.items()}
ENDS = {"pp": (1, None), "bp": (1, 0), "pbp": (1, 1), "bb": (2, None), "pbb": (2, None)}
"""By history: what is won, and the seat that wins it (None: the higher card)."""
ILLEGAL = -2.0
"""Reward of a reply that is no action, as low as the worst loss. The other seat gets nothing."""


def won_by_first(deal: Sequence[str], history: str) -> float:
    """What seat 0 wins at the end of a game."""
    won, winner = ENDS[history]
    return won if winner == 0 or (winner is None and _is_higher(deal)) else -won


def _is_higher(deal: Sequence[str]) -> bool:
    return CARDS.index(deal[0]) > CARDS.index(deal[1])


def asked(card: str, history: str) -> Message:
    """What a seat is told: its card, and what was said before."""
    return {"role": "user", "content": " ".join([f"Card {card}", *(WORDS[letter] for letter in history)])}


class Kuhn(Playable):
    """Seeds 0 to 5 are the six deals, and so on in turn. Rewards are what each seat wins, from -2 to 2."""

    name, num_turns, num_seats, is_quick = "kuhn", 3, 2, True

    def task(self, seed: int, level: int) -> Task:
        deal = DEALS[seed % len(DEALS)]
        return Task(self.name, seed, level, (asked(deal[0], ""),), {"deal": list(deal)})

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
        told = asked(self._deal[1], action) if other == 1 else {"role": "user", "content": WORDS[action]}
        return Turn((told,), seat=other)


def _end(rewards: tuple[float, float], *, is_illegal: bool) -> Turn:
    won, other = ({"won": reward} for reward in rewards)
    return Turn(is_done=True, rewards=won, seat_rewards=(other,), metrics={"illegal": float(is_illegal)})
