"""Texts to write under instructions that a program checks: one, two or three of them, by level.

A task is a form, a topic and instructions. Every combination has been followed: where the instructions drawn together
cannot be, others are drawn. The reward is 1 where all are followed, else 0 (all or nothing, as GLM-4.5 rewards calls of
functions); the metric "followed" is their share. Whether the text is any good is for a judge to say.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from glm5.rl.environments.families import shuffled
from glm5.rl.environments.instruction_kinds import KINDS, SENTENCES
from glm5.rl.environments.protocol import Environment, Reply, Task, Turn
from glm5.rl.environments.single_turn import SingleTurn

FORMS = (
    *("a note", "a short text", "a message to a friend", "an entry for a diary", "a reply to a reader"),
    *("a hint for beginners", "an answer for a child", "a toast"),
)
_WORDS = """
rain bread salt wool glass snow tea iron maps clocks bridges gardens trains birds bees music chess sleep dreams
letters rivers winter summer markets lamps ladders kites boats shoes hats soup apples honey paper ink coins doors
windows stairs roofs wells walls roads wheels mirrors stones sand dust smoke fire shadows clouds stars tides islands
deserts forests mushrooms moss foxes owls horses whales spiders ants silk pepper mint garlic rice beans cheese
butter cakes dances songs stories jokes riddles games knots nets ropes tents tools nails hammers pens chalk
"""
TOPICS = _WORDS.split()
RUBRIC = "Is the text about its topic, correct, fluent and natural, beyond following the instructions?"
_ATTEMPTS = 200


class Instructions(Environment):
    """Level n asks n + 1 instructions. The first 20,000 seeds of a level are different tasks."""

    name, levels, is_quick = "instructions", 3, True

    def task(self, seed: int, level: int) -> Task:
        names, place = list(KINDS), shuffled(seed, len(FORMS) * len(TOPICS) * len(KINDS))
        place, form = divmod(place, len(FORMS))
        kind, topic = divmod(place, len(TOPICS))
        chosen, asked, text = _drawn(names[kind], level, Random(f"instructions {seed} {level}"))
        prompt = " ".join([f"Write {FORMS[form]} about {TOPICS[topic]}.", *asked])
        data = {"instructions": chosen, "text": text, "rubric": RUBRIC}
        return Task(self.name, seed, level, ({"role": "user", "content": prompt},), data)

    def reset(self, task: Task) -> SingleTurn:
        return SingleTurn(task, lambda reply: _scored(reply, task))

    def oracle(self, task: Task) -> Sequence[Reply]:
        return [Reply(task.data["text"])]

    def unsolved(self, task: Task) -> Sequence[Reply]:
        name, point = task.data["instructions"][0]
        return [Reply(KINDS[name].break_(task.data["text"], point))]


def _drawn(first: str, level: int, random: Random) -> tuple[list[Any], list[str], str]:
    """Instructions, the sentences that ask for them, and a text that follows all."""
    for _ in range(_ATTEMPTS):
        chosen = [first, *random.sample([name for name in KINDS if name != first], level)]
        points = {name: {key: random.choice(values) for key, values in KINDS[name].grid.items()} for name in chosen}
        text = SENTENCES["English"]
        for name, kind in KINDS.items():
            text = kind.follow(text, points[name]) if name in points else text
        pairs = [[name, points[name]] for name in chosen]
        broken = KINDS[first].break_(text, points[first])
        if followed(text, pairs) == 1 and not KINDS[first].check(broken.strip(), points[first]):
            return pairs, [KINDS[name].ask.format_map(points[name]) for name in chosen], text
    raise AssertionError(f"{first} goes with no other instructions of level {level}")


def followed(text: str, instructions: Sequence[Any]) -> float:
    """The share of instructions, pairs of a kind and its parameters, that a text follows."""
    text = text.strip()
    return sum(KINDS[name].check(text, point) for name, point in instructions) / len(instructions) if text else 0.0


def _scored(reply: Reply, task: Task) -> Turn:
    share = followed(reply.content, task.data["instructions"])
    return Turn(is_done=True, rewards={"instructions": float(share == 1)}, metrics={"followed": share})
