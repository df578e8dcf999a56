"""How many tokens of prompts a step takes beside sequences that decode, so that these get their next tokens in time.

    seconds of a step = decode(sequences) + row * rows + key * sum over rows of the keys before each

All three are measured, as what a CPU does in a second cannot be told from the model: elements, instructions and
threads change it by a factor of ten. `decode` is what steps without prompts took, by powers of two of their sequences.
The other two are moved by what a step took longer than they say, in the direction in which it had rows and keys. A step
may take the wanted seconds, or twice as long as without prompts if that is more, so that prompts get on beside a crowd
too.

Nothing here looks at a clock: the same steps and seconds give the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from glm5.config.engine import EngineConfig
from glm5.engine.core.depth import StepCost
from glm5.engine.scheduler.messages import Message, Submit
from glm5.engine.scheduler.plan import Item
from glm5.engine.scheduler.scheduler import Scheduler

CPU_MS = 80.0  # what a server on a CPU aims at: below what a reader notices, many times what a step costs beside rows
FIRST_ROWS = 16  # of prompts beside others before anything is known: no longer per row than more of them
KEYS = 1024.0  # that cost as much as a row's own, at first: fewer than of any model, so that long contexts are dear
WEIGHT = 0.3  # of a new measurement
MOST_OF_STEP = 0.5  # that sequences which decode have of a step: what they took before may be out of date


class PromptPace:
    """Tell it what each step computed and how long it took (`observe`), ask before each step (`choose`)."""

    def __init__(self, seconds: float, limit: int):
        self.seconds, self.limit = seconds, limit
        self._decode: dict[int, float] = {}  # by bits of the number of sequences
        self._row = self._keys = 0.0  # seconds of a row, and of KEYS keys before it; 0: nothing is known

    def observe(self, items: Sequence[Item], seconds: float) -> None:
        """The rows of a step, and how long it took."""
        chunks = [item for item in items if item.kind == "prefill"]
        num_decoding = len(items) - len(chunks)
        if not chunks:
            bits = num_decoding.bit_length()
            before = self._decode.get(bits, seconds)
            self._decode[bits] = before + WEIGHT * (seconds - before)
            return
        seconds -= min(self._decode_seconds(num_decoding), MOST_OF_STEP * seconds)
        rows = sum(item.num_rows for item in chunks)
        keys = sum(item.num_rows * (item.start + item.num_rows / 2) for item in chunks) / KEYS
        if not self._row:
            self._row = self._keys = seconds / (rows + keys)
        surprise = WEIGHT * (seconds - self._row * rows - self._keys * keys) / (rows**2 + keys**2)
        self._row = max(self._row + surprise * rows, 0.0)
        self._keys = max(self._keys + surprise * keys, 0.0)

    def choose(self, num_decoding: int, start: int) -> int:
        """The most tokens of prompts, at least 1, for a step beside `num_decoding`, of which those of the longest
        context follow `start` others."""
        if not self._row + self._keys:
            return min(FIRST_ROWS, self.limit)
        decode = self._decode_seconds(num_decoding)
        seconds, key = max(self.seconds, 2 * decode) - decode, self._keys / KEYS
        # row n + key (start n + n n / 2) = seconds
        first = self._row + key * start
        return max(1, int(min(self.limit, 2 * seconds / (first + sqrt(first**2 + 2 * key * seconds)))))

    def _decode_seconds(self, num_decoding: int) -> float:
        """Of as many sequences, or of fewer if that is all that is known."""
        known = [bits for bits in self._decode if bits <= num_decoding.bit_length()]
        return self._decode[max(known)] if known else 0.0


@dataclass(frozen=True)
class PromptShare:
    """How prompts are cut beside requests that decode: by a `pace`, to `max_tokens`, or not at all."""

    pace: PromptPace | None = None
    max_tokens: int | None = None
    ms: float | None = None

    @classmethod
    def of(cls, config: EngineConfig, device_type: str, cost: StepCost) -> "PromptShare":
        """On a CPU a step is over when it is launched, so that it can be measured."""
        ms, limit, is_cpu = config.max_inter_token_ms, config.max_num_batched_tokens, device_type == "cpu"
        if ms == "auto":
            ms = CPU_MS if is_cpu else None
        if ms is None:
            return cls()
        if is_cpu:
            return cls(PromptPace(ms / 1e3, limit), ms=ms)
        return cls(max_tokens=cost.rows_within(ms / 1e3, limit), ms=ms)

    def __str__(self) -> str:
        if self.ms is None:
            return "as many tokens as a step has room for"
        how = "by what steps took before" if self.max_tokens is None else f"{self.max_tokens} tokens by estimate"
        return f"while requests decode, as many tokens as a step computes in {self.ms:g} ms, {how}"


def furthest_prompt(scheduler: Scheduler, messages: Sequence[Message]) -> int | None:
    """Tokens before the next rows of prompts, at most; None if there are no prompts. `messages` are not delivered yet.

    Of a prompt that is about to be admitted all but the last may be found in a cache.
    """
    config, pool = scheduler.config, scheduler.page_manager.pool
    has_slot = len(scheduler.prompting) + len(scheduler.decoding) < config.max_num_seqs
    starts = [seq.computed for seq in scheduler.prompting]
    for seq in scheduler.waiting[:1]:
        fits = config.pages_for(len(seq.tokens)) + config.headroom * config.num_pages <= pool.num_available
        starts += [len(seq.tokens) - 1] if has_slot and fits else []
    starts += [len(message.prompt_ids) - 1 for message in messages if isinstance(message, Submit)]
    return max(starts, default=None)
