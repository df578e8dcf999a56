"""How many prompt tokens a step computes while other sequences decode, so that these get their next tokens in time.

    seconds of a step = decode(sequences) + row * rows + key * sum over rows of the keys before each

All three are measured, since the model alone does not determine a CPU's speed: dtypes, instructions and threads change
it by a factor of ten. `decode` is the time of steps without prompts, by powers of two of their sequences. `row` and
`key` are corrected by the prediction error of each step, in proportion to its rows and keys. A step may take the
target seconds, or twice as long as without prompts if that is more, so that prompts also progress while many decode.

Nothing here reads a clock: the same steps and seconds give the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from glm5.config.engine import EngineConfig
from glm5.engine.core.depth import StepCost
from glm5.engine.scheduler.messages import Message, Submit
from glm5.engine.scheduler.plan import Item
from glm5.engine.scheduler.scheduler import Scheduler

CPU_MS = 80.0  # target of a server on a CPU: below what a reader notices, many times a step's fixed cost
FIRST_ROWS = 16  # prompt rows in a step before any measurement: enough for the full speed per row
KEYS = 1024.0  # keys whose initial cost is that of one row: fewer than in any model, so long contexts are overestimated
WEIGHT = 0.3  # of a new measurement
MOST_OF_STEP = 0.5  # the most of a step that is attributed to decoding: earlier measurements may be outdated


class PromptPace:
    """Limits prompt tokens. Call `observe` with each step's items and seconds, `choose` before a step."""

    def __init__(self, seconds: float, limit: int):
        self.seconds, self.limit = seconds, limit
        self._decode: dict[int, float] = {}  # by bits of the number of sequences
        self._row = self._keys = 0.0  # seconds of a row, and of KEYS keys before it; 0: not measured

    def observe(self, items: Sequence[Item], seconds: float) -> None:
        """Learn from a step's items and the seconds that it took."""
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
        error = WEIGHT * (seconds - self._row * rows - self._keys * keys) / (rows**2 + keys**2)
        self._row = max(self._row + error * rows, 0.0)
        self._keys = max(self._keys + error * keys, 0.0)

    def choose(self, num_decoding: int, start: int) -> int:
        """The most prompt tokens, at least 1, for a step with `num_decoding` decoding sequences. `start`: tokens before
        the chunk that has the longest context."""
        if not self._row + self._keys:
            return min(FIRST_ROWS, self.limit)
        decode = self._decode_seconds(num_decoding)
        seconds, key = max(self.seconds, 2 * decode) - decode, self._keys / KEYS
        # row n + key (start n + n n / 2) = seconds
        first = self._row + key * start
        return max(1, int(min(self.limit, 2 * seconds / (first + sqrt(first**2 + 2 * key * seconds)))))

    def _decode_seconds(self, num_decoding: int) -> float:
        """Measured seconds for this many sequences, or for fewer if no others were measured."""
        known = [bits for bits in self._decode if bits <= num_decoding.bit_length()]
        return self._decode[max(known)] if known else 0.0


@dataclass(frozen=True)
class PromptShare:
    """How prompts are chunked while requests decode: by a `pace`, to `max_tokens`, or without a limit."""

    pace: PromptPace | None = None
    max_tokens: int | None = None
    ms: float | None = None

    @classmethod
    def of(cls, config: EngineConfig, device_type: str, cost: StepCost) -> "PromptShare":
        """Only a CPU's steps can be timed: a launch there returns when the step is computed."""
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
    """The most tokens that may precede the next prompt chunk; None without prompts. `messages`: not delivered yet.

    For a prompt that is about to be admitted, all tokens but the last may be found in a cache.
    """
    config, pool = scheduler.config, scheduler.page_manager.pool
    has_slot = len(scheduler.prompting) + len(scheduler.decoding) < config.max_num_seqs
    starts = [seq.computed for seq in scheduler.prompting]
    for seq in scheduler.waiting[:1]:
        fits = config.pages_for(len(seq.tokens)) + config.headroom * config.num_pages <= pool.num_available
        starts += [len(seq.tokens) - 1] if has_slot and fits else []
    starts += [len(message.prompt_ids) - 1 for message in messages if isinstance(message, Submit)]
    return max(starts, default=None)
