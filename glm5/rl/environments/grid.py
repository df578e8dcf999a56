"""A key, a door and walls on a square grid: fetch the key, then reach the door, in as few steps as can be.

A reply is one or more steps out of N, E, S, W ("EES"); the answer says where that led. The reward at the door is (steps
of the shortest way) / (steps taken): 1.0 is the optimum, which breadth-first search finds. Steps into a wall or over
the edge count and lead nowhere. Levels: 3 x 3 without walls, 4 x 4 with 3, 5 x 5 with 6.

    Grid 4 me 0 0 key 2 1 door 3 3 wall 1 1 2 2 0 3         numbers are column (from the west) and row (from the north)
"""

from collections import deque
from collections.abc import Sequence
from random import Random

from glm5.rl.environments.protocol import Episode, Playable, Reply, Task, Turn

LEVELS = ((3, 0), (4, 3), (5, 6))
"""Of each: side, number of walls."""
MOVES = {"N": (0, -1), "E": (1, 0), "S": (0, 1), "W": (-1, 0)}
NUM_TURNS = 12
MAX_STEPS = 30

Cell = tuple[int, int]


class Grid(Playable):
    """Every task can be solved, within MAX_STEPS steps."""

    name, levels, num_turns, is_quick = "grid", len(LEVELS), NUM_TURNS, True

    def task(self, seed: int, level: int) -> Task:
        (side, num_walls), random = LEVELS[level], Random(f"grid {level} {seed}")
        cells = [(column, row) for row in range(side) for column in range(side)]
        while True:
            me, key, door, *walls = random.sample(cells, 3 + num_walls)
            if way := shortest_way(side, me, key, door, set(walls)):
                break
        places = {"me": [me], "key": [key], "door": [door]} | ({"wall": walls} if walls else {})
        words = [f"{name} {' '.join(f'{x} {y}' for x, y in named)}" for name, named in places.items()]
        asked = {"role": "user", "content": " ".join([f"Grid {side}", *words])}
        data = {"side": side, "me": list(me), "key": list(key), "door": list(door), "walls": [list(w) for w in walls]}
        return Task(self.name, seed, level, (asked,), data | {"way": way})

    def reset(self, task: Task) -> "GridEpisode":
        return GridEpisode(task)

    def oracle(self, task: Task) -> Sequence[Reply]:
        return [Reply(task.data["way"])]

    def random_reply(self, task: Task, random: Random, asked: str) -> Reply:
        return Reply("".join(random.choices(list(MOVES), k=random.randint(1, 4))))


def shortest_way(side: int, me: Cell, key: Cell, door: Cell, walls: set[Cell]) -> str:
    """Steps from `me` over the key to the door; "" if there is no way. The door blocks until the key is there."""
    first, then = _way(side, me, key, walls | {door}), _way(side, key, door, walls)
    return first + then if first and then else ""


def _way(side: int, start: Cell, goal: Cell, walls: set[Cell]) -> str:
    ways, queue = {start: ""}, deque([start])
    while queue:
        cell = queue.popleft()
        if cell == goal:
            return ways[cell]
        for move in MOVES:
            reached = _moved(side, cell, move, walls)
            if reached not in ways:
                ways[reached] = ways[cell] + move
                queue.append(reached)
    return ""


def _moved(side: int, cell: Cell, move: str, walls: set[Cell]) -> Cell:
    (x, y), (dx, dy) = cell, MOVES[move]
    reached = (x + dx, y + dy)
    return reached if reached not in walls and 0 <= reached[0] < side and 0 <= reached[1] < side else cell


class GridEpisode(Episode):
    """One walk. A reply that is no row of steps ends it with reward 0, as do too many steps or replies."""

    def __init__(self, task: Task) -> None:
        self.messages = task.messages
        data = task.data
        self._side, self._way = data["side"], data["way"]
        self._cell, self._key, self._door = tuple(data["me"]), tuple(data["key"]), tuple(data["door"])
        self._walls = {(x, y) for x, y in data["walls"]}
        self._has_key, self._num_steps, self._num_replies = False, 0, 0

    def step(self, reply: Reply) -> Turn:
        moves = reply.content.strip()
        self._num_replies += 1
        if not moves or not set(moves) <= MOVES.keys() or reply.is_truncated:
            return self._end(0.0)
        for move in moves:
            self._num_steps += 1
            if self._num_steps > MAX_STEPS:
                return self._end(0.0)
            closed = self._walls if self._has_key else self._walls | {self._door}
            self._cell = _moved(self._side, self._cell, move, closed)
            self._has_key = self._has_key or self._cell == self._key
            if self._cell == self._door:
                return self._end(len(self._way) / self._num_steps)
        if self._num_replies == NUM_TURNS:
            return self._end(0.0)
        has_key = " key" if self._has_key else ""
        return Turn(({"role": "user", "content": f"me {self._cell[0]} {self._cell[1]}{has_key}"},))

    def _end(self, reward: float) -> Turn:
        return Turn(is_done=True, rewards={"door": reward}, metrics={"steps": float(self._num_steps)})
