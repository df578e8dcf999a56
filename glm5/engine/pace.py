"""How many tokens of prompts a step takes beside sequences that decode, so that these get their next tokens in time.

    seconds of a step = decode(sequences) + sum over chunks of rows * row(context)

`decode` is what steps without prompts took, `row` what the rows of others took, kept by powers of two: a row reads the
keys before it, so it is cheap at the start of a long prompt and dear at its end. Both are measured, as what a CPU does
in a second cannot be told from the model: elements, instructions and threads change it by a factor of ten. What is not
measured yet is taken from the nearest shorter context, a row costing twice as much in the next power of two, which is
the most that it can. A step may take the wanted seconds, or twice as long as without prompts if that is more, so that
prompts get on beside a crowd too.

Nothing here looks at a clock: the same steps and seconds give the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from glm5.config.engine import EngineConfig
from glm5.engine.depth import StepCost
from glm5.engine.messages import Message, Submit
from glm5.engine.plan import Item
from glm5.engine.scheduler import Scheduler

CPU_MS = 100.0  # what a server on a CPU aims at: below what a reader notices, many times what a step costs beside rows
FIRST_ROWS = 16  # of prompts beside others before anything is known: no longer per row than more of them
WEIGHT = 0.3  # of a new measurement
MOST_OF_STEP = 0.5  # that sequences which decode have of a step: what they took before may be out of date


class PromptPace:
    """Tell it what each step computed and how long it took (`observe`), ask before each step (`choose`)."""

    def __init__(self, seconds: float, limit: int):
        self.seconds, self.limit = seconds, limit
        # By bits of the number of sequences, and of the tokens up to and including a chunk.
        self._decode: dict[int, float] = {}
        self._row: dict[int, float] = {}

    def observe(self, items: Sequence[Item], seconds: float) -> None:
        """The rows of a step, and how long it took."""
        chunks = [((item.start + item.num_rows).bit_length(), item.num_rows) for item in items if item.kind != "decode"]
        num_decoding = len(items) - len(chunks)
        if not chunks:
            _note(self._decode, num_decoding.bit_length(), seconds)
            return
        seconds -= min(self._decode_seconds(num_decoding), MOST_OF_STEP * seconds)
        expected = {bits: self._row_seconds(bits) or 1.0 for bits, _ in chunks}
        ratio = seconds / sum(num_rows * expected[bits] for bits, num_rows in chunks)
        for bits, value in expected.items():
            _note(self._row, bits, value * ratio)

    def choose(self, num_decoding: int, start: int) -> int:
        """The most tokens of prompts, at least 1, for a step beside `num_decoding`, of which those of the longest
        context follow `start` others."""
        decode = self._decode_seconds(num_decoding)
        seconds = max(self.seconds, 2 * decode) - decode
        num_rows, bits = 1, (start + 1).bit_length()
        while num_rows < self.limit:
            row = self._row_seconds(bits)
            fit = int(seconds / row) if row else FIRST_ROWS
            last = (1 << bits) - 1 - start  # the most rows that end at a position of so many bits
            num_rows = max(num_rows, min(fit, last))
            if fit <= last:
                break
            bits += 1
        return min(num_rows, self.limit)

    def _decode_seconds(self, num_decoding: int) -> float:
        """Of as many sequences, or of fewer if that is all that is known."""
        bits = max((bits for bits in self._decode if bits <= num_decoding.bit_length()), default=None)
        return 0.0 if bits is None else self._decode[bits]

    def _row_seconds(self, bits: int) -> float | None:
        """At a context of so many bits, at most; None if nothing is known."""
        shorter = max((known for known in self._row if known <= bits), default=None)
        longer = min((known for known in self._row if known > bits), default=None)
        found = [] if shorter is None else [self._row[shorter] * 2.0 ** (bits - shorter)]
        found += [] if longer is None else [self._row[longer]]
        return min(found, default=None)


@dataclass(frozen=True)
class Beside:
    """How prompts are cut beside requests that decode: by a `pace`, to `max_tokens`, or not at all."""

    pace: PromptPace | None = None
    max_tokens: int | None = None
    ms: float | None = None

    @classmethod
    def of(cls, config: EngineConfig, device_type: str, cost: StepCost) -> "Beside":
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

    Of a prompt that is not admitted all but the last may be found in a cache.
    """
    starts = [seq.computed for seq in scheduler.prompting]
    if len(scheduler.prompting) + len(scheduler.decoding) < scheduler.config.max_num_seqs:
        starts += [len(seq.tokens) - 1 for seq in scheduler.waiting[:1]]
        starts += [len(message.prompt_ids) - 1 for message in messages if isinstance(message, Submit)]
    return max(starts, default=None)


def _note(known: dict[int, float], bits: int, value: float) -> None:
    known[bits] = value if bits not in known else known[bits] + WEIGHT * (value - known[bits])
