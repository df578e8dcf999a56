"""Rollouts that nothing sampled, and the folder of a run that recorded them."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import numpy as np

from glm5.chat.tokenizer import Tokenizer, train_bpe
from glm5.rl.environments.protocol import Task
from glm5.rl.records.store import RecordWriter
from glm5.rl.records.trace import Columns
from glm5.rl.rollout import Group, Rollout
from glm5.rl.segments import Segment
from glm5.rl.view.server import serving
from tests.support.masks import recorded_mask

QUESTION = "Guess 1 to 15"
TEXTS = [QUESTION, "lower", "higher", "<think>between 1 and 15</think>", *map(str, range(1, 16))]


def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 300)


def random_rollout(random: Random, task: Task, *, with_records: bool = True) -> Rollout:
    """A conversation of several turns with a branch, random tokens and, `with_records`, experts and kept sets. Its
    log-probabilities are about those of 320 equal ones."""
    rollout = Rollout(task, random.getrandbits(64), temperature=0.7, top_p=0.9, top_k=5, num_turns=2)
    leaf, half = None, random.choice(["\ud800", "\u2028"])  # half of a character, and one that ends lines in text
    for number in range(random.randint(2, 5)):
        count = random.randint(1, 6)
        ids = [random.randrange(300) for _ in range(count)]
        segment = Segment(ids, leaf)
        if number % 2:
            versions = [random.randrange(4) for _ in ids]
            kept = [recorded_mask([one, *random.sample(range(300), random.choice([3, 30]))], 300) for one in ids]
            segment = Segment(ids, leaf, True, [-abs(random.gauss(5.8, 0.7)) for _ in ids], versions)
            if with_records:
                segment.kept = [b"" if random.random() < 0.2 else own for own in kept]
                segment.experts = np.array(
                    [[[random.randrange(-1, 8) for _ in range(2)] for _ in range(3)] for _ in ids], np.int16
                )
                segment.key_versions = [one - 1 for one in versions]
                segment.context_versions = [(versions[0] - 1, 5), (versions[0], 2)]
        leaf = rollout.tree.add(segment)
        rollout.messages.append({"role": "assistant" if number % 2 else "user", "content": half + str(number)})
        if number == 2:
            rollout.tree.add(Segment([1, 2], 0, True, [-0.5, -1 / 3], [3, 3]))  # an answer tried again
    rollout.rewards = {"answer": random.random(), "form": 0.1}
    rollout.metrics = {"guesses": 2.0}
    return rollout


def task_of(seed: int) -> Task:
    return Task("guess", seed, 0, ({"role": "user", "content": QUESTION},), {"secret": seed}, ({"name": "t"},))


def write_run(out: Path, steps: int = 3, num_groups: int = 4, size: int = 8) -> None:
    """The folder of a run of a hidden number, as `glm5 rl` leaves it; the same every time."""
    out.mkdir(exist_ok=True)
    (out / "recipe.json").write_text("{}")
    tokens = tokenizer()
    tokens.save(out / "policy")
    writer = RecordWriter(out, 2**30, 1)
    lines = [{"step": 0, "eval/mean": 0.2}]
    for step in range(1, steps + 1):
        random = Random(step)
        games = [[_game(tokens, random, secret, step) for _ in range(size)] for secret in range(1, num_groups + 1)]
        groups = [
            Group(number, games[number][0][0].task, [one for one, _ in games[number]]) for number in range(num_groups)
        ]
        columns = [[own for _, own in game] for game in games]
        writer.write(step, steps, {"w": "0"}, groups, columns)
        mean = sum(one.reward for group in groups for one in group.rollouts) / (num_groups * size)
        lines.append({"step": step, "reward/mean": mean, "entropy": 2.0 / step, "time/step": 1.5})
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _game(tokens: Tokenizer, random: Random, secret: int, step: int) -> tuple[Rollout, Sequence[Columns | None]]:
    rollout = Rollout(task_of(secret), random.getrandbits(60), num_turns=0)
    columns: list[Columns | None] = []
    heard, leaf, low, high = QUESTION, None, 1, 15
    for turn in range(4):
        rollout.messages.append({"role": "user", "content": heard})
        leaf = rollout.tree.add(Segment(tokens.encode(f"<|user|>{heard}<|assistant|>"), leaf))
        guess = random.choice([(low + high) // 2, random.randint(low, high)])
        ids = tokens.encode(f"<think>between {low} and {high}</think>{guess}<|user|>")
        logprobs = [-random.expovariate(0.6) for _ in ids]
        leaf = rollout.tree.add(Segment(ids, leaf, True, logprobs, [step - 1] * len(ids)))
        thought = f"between {low} and {high}"
        rollout.messages.append({"role": "assistant", "content": str(guess), "reasoning_content": thought})
        rollout.num_turns = turn + 1
        shift = [random.gauss(0, 0.3) if random.random() < 0.5 else 0.0 for _ in ids]
        masked = [abs(one) > 0.69 for one in shift]
        columns += [
            None,
            {
                "trainer_logprobs": [min(0.0, a + b) for a, b in zip(logprobs, shift, strict=True)],
                "masked": masked,
                "entropies": [1.25 for _ in ids],
            },
        ]
        if guess == secret:
            break
        heard = "lower" if secret < guess else "higher"
        low, high = (low, guess - 1) if secret < guess else (guess + 1, high)
    rollout.rewards = {"found": float(guess == secret)}
    for own in columns:
        if own is not None:
            count = len(own["masked"])
            own |= {"advantages": [rollout.reward - 0.4] * count}  # pyright: ignore[reportOperatorIssue]
            own |= {"weights": [0.0 if one else rollout.reward - 0.4 for one in own["masked"]]}  # pyright: ignore[reportOperatorIssue]
    return rollout, columns


@contextmanager
def viewed(out: Path) -> Iterator[httpx.Client]:
    """A client of the pages of the run in `out`."""
    with serving(out, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}") as client:
            yield client
        server.shutdown()
        thread.join()
