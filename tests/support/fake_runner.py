"""A runner without a model: tokens are hashes of the sequence so far, so every answer can be foretold.

A page holds, for each of its rows, the hash of all tokens up to it and the weights that computed it. Before a row is
computed everything before it is compared with what it must be, so a page that was mixed up, copied wrongly or shared
across weights is an assertion error. Pages are real tensors, which real tiers can move.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from glm5.common.errors import CheckpointError, RequestError
from glm5.engine.runner.result import StepResult
from glm5.engine.runner.runner import SeqSpec
from glm5.engine.scheduler.plan import Item, StepPlan
from glm5.engine.transport.wire import PushCall, RoutedExperts, TokenLogprobs

PRIME = 2**61 - 1
JUNK = -7
TORN = -1  # weights of which a push has written some
NUM_LAYERS, NUM_EXPERTS = 2, 2


def extended(value: int, token_id: int) -> int:
    """Hash of a sequence that grew by a token."""
    return (value * 1_000_003 + token_id + 7) % PRIME


def hashes(token_ids: Sequence[int]) -> list[int]:
    """One for each position: of all tokens up to it."""
    value, found = 1, []
    for token_id in token_ids:
        value = extended(value, token_id)
        found.append(value)
    return found


def drawn(value: int, seed: int, weights: int, vocab_size: int) -> int:
    """The token after a sequence of that hash."""
    return (value * 2_654_435_761 + seed * 97 + weights * 31) % PRIME % vocab_size


def logprob_of(value: int, token_id: int) -> float:
    return -((value + token_id) % 1000) / 1000


def experts_of(value: int, weights: int) -> list[int]:
    """Of one token, all layers: what `RoutedExperts` holds for it."""
    return [(value // (7 + i) + weights) % 251 for i in range(NUM_LAYERS * NUM_EXPERTS)]


def lone_run(
    prompt: Sequence[int], seed: int, max_tokens: int, vocab_size: int, stop_ids=(), min_tokens=0, weights: int = 0
) -> list[int]:
    """The answer of a sequence that has a runner to itself."""
    value, answer = hashes(prompt)[-1], []
    while len(answer) < max_tokens:
        answer.append(drawn(value, seed, weights, vocab_size))
        value = extended(value, answer[-1])
        if answer[-1] in stop_ids and len(answer) >= min_tokens:
            break
    return answer


class FakeWeights:
    """Weights are a number. `staging`: the future of the update under way, for a test to end.

    A push names its number as its tensors, and "some" in one of its names: it lacks tensors of the model.
    """

    def __init__(self):
        self.version, self.identity, self.number = 0, b"start", 0
        self.staging: Future | None = None
        self.at_once = True
        self.level = 0
        self.has_source = True

    def stage(self, folder: Path) -> Future:
        self.staging = Future()
        if self.at_once:
            self.finish(folder)
        return self.staging

    def finish(self, folder: Path) -> None:
        """The name of the folder is the number of the weights."""
        assert self.staging is not None
        if folder.name.isdigit():
            self.staging.set_result(StagedNumber(folder.name))
        else:
            self.staging.set_exception(CheckpointError(f"{folder} is damaged"))

    def swap(self, staged: int, version: int) -> None:
        self.number, self.version, self.identity = staged, version, f"{staged} of update {version}".encode()

    def prepare(self, push: PushCall) -> Future:
        self.push = push
        names = [tensor.name for bucket in push.buckets for tensor in bucket]
        refused = next((CheckpointError(f"{name} is no number") for name in names if name == "x"), None)
        return ended("some" not in names, refused)

    def check_sum(self, number: int, checksum: int) -> Future:
        return ended(None, CheckpointError(f"bucket {number} has a wrong checksum") if checksum else None)

    def write(self, number: int) -> Future:
        self.number = TORN
        return ended(None)

    def end_push(self, version: int | None) -> None:
        if version is None:
            return
        number = int(self.push.buckets[0][0].name)
        self.number, self.version, self.identity = number, version, f"{number} of update {version}".encode()

    def take_changes(self, version: int, *, closely: bool) -> bool:
        return False

    def check_source(self) -> None:
        if not self.has_source:
            raise RequestError("came from memory")

    def release(self, level: int) -> int:
        self.level = level
        return 1000 * (level == 2)

    def restore(self) -> bool:
        was_dropped, self.level = self.level == 2, 0
        if was_dropped:
            self.number, self.version, self.identity = 0, 0, b"start"
        return was_dropped


class StagedNumber(int):
    is_complete, num_bytes = True, 12


def ended(result, error: Exception | None = None) -> Future:
    future = Future()
    future.set_result(result) if error is None else future.set_exception(error)
    return future


@dataclass
class Slot:
    seq_id: int
    spec: SeqSpec
    tokens: list[int]
    hashes: list[int]
    table: list[int]
    num_changes: int
    drafts: list[int] = field(default_factory=list)
    masks: np.ndarray | None = None

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.hashes.append(extended(self.hashes[-1], token_id))
        self.tokens += token_ids


class Launched:
    def __init__(self, result: StepResult):
        self.result, self.num_reads = result, 0

    def read(self) -> StepResult:
        self.num_reads += 1
        assert self.num_reads == 1, "read twice"
        return self.result


class FakeRunner:
    """`draft_quality`: of drafts that are right, in 1/8. `fails_at`: the step that raises."""

    def __init__(
        self,
        weights: FakeWeights,
        *,
        num_pages: int,
        page_size: int,
        vocab_size: int = 50,
        max_depth: int = 0,
        draft_quality: int = 5,
    ):
        self.weights, self.page_size, self.vocab_size = weights, page_size, vocab_size
        self.max_depth, self.draft_quality = max_depth, draft_quality
        self.num_pages = num_pages
        self.restore_memory()
        self.slots: dict[int, Slot] = {}
        self.permitted: dict[int, np.ndarray] = {}
        self.plans: list[StepPlan] = []
        self.launched: Launched | None = None
        self.fails_at: int | None = None
        self.history = [weights.number]

    def parts(self) -> dict[str, torch.Tensor]:
        return {"keys": self.pool}

    def release_memory(self) -> int:
        assert self.launched is None or self.launched.num_reads, "a step is under way"
        self.pool.fill_(JUNK)
        self.is_released = True
        return self.pool.numel() * 8

    def restore_memory(self) -> None:
        if not hasattr(self, "pool"):
            self.pool = torch.full((self.num_pages + 1, self.page_size, 2), JUNK, dtype=torch.int64)
            self.rows = self.pool.numpy()
        self.is_released = False

    def weights_changed(self) -> None:
        self.history.append(self.weights.number)

    def set_bitmasks(self, slots, bitmasks) -> None:
        assert bitmasks.shape[1] == 1 + self.max_depth
        self.permitted = {slot: mask.numpy().copy() for slot, mask in zip(slots, bitmasks, strict=True)}

    def launch(self, plan: StepPlan, specs: Mapping[int, SeqSpec]) -> Launched:
        assert not self.is_released or not (plan.items or plan.page_copies), "the memory is given back"
        assert not plan.items or self.history[-1] == self.weights.number, "weights_changed was not called"
        if plan.step == self.fails_at:
            raise FloatingPointError("the device is on fire")
        self.plans.append(plan)
        for seq_id, slot, token_ids, pages, *_ in plan.entered:
            known = list(token_ids), hashes(token_ids), list(pages)
            self.slots[slot] = Slot(seq_id, specs[seq_id], *known, len(self.history) - 1)
        for slot, column, page in plan.table:
            self.slots[slot].table[column : column + 1] = [page]
        for source, target in plan.page_copies:
            self.rows[target] = self.rows[source]
        result = StepResult(num_drafted=[0] * self.max_depth, num_accepted=[0] * self.max_depth)
        for item in plan.items:
            slot = self.slots[item.slot]
            assert slot.seq_id == item.seq_id, f"{item} in the slot of {slot.seq_id}"
            assert item.seq_id in specs
            self._run(item, slot, plan.draft_depth, result)
        self.permitted = {}
        launched = Launched(result)
        if plan.items:
            self.launched = launched
        return launched

    def _run(self, item: Item, slot: Slot, draft_depth: int, result: StepResult) -> None:
        spec, seq_id = slot.spec, item.seq_id
        if item.kind == "prefill":
            start, end = item.start, item.start + item.num_rows
            self._compute(slot, start, end)
            self._report_prompt(slot, start, end, result)
            if not item.samples:
                return
            assert end == len(slot.tokens)
        else:
            start = len(slot.tokens) - 1
        drafts = (slot.drafts + [0] * self.max_depth)[: item.depth]
        tokens, no_valid_token = self._draw(slot, drafts, item.slot)
        if no_valid_token:
            result.no_valid_token.add(seq_id)
        for position in range(item.depth):
            result.num_drafted[position] += 1
            result.num_accepted[position] += position < len(tokens) - 1
        before = slot.hashes[-1]
        slot.extend(tokens)
        if item.kind == "decode":
            self._compute(slot, start, start + len(tokens))
            for position in range(start + len(tokens), start + item.num_rows):
                self._write(slot, position, JUNK)
        if spec.routed and item.kind == "decode":
            result.routed[seq_id] = self._experts(slot, start, start + len(tokens))
        result.tokens[seq_id] = tokens
        slot.drafts = self._drafts(slot, draft_depth) + slot.drafts[draft_depth:]
        result.drafts[seq_id] = (slot.drafts + [0] * self.max_depth)[: self.max_depth]
        if spec.params.logprobs is not None:
            result.logprobs[seq_id] = []
            for token_id in tokens:
                entry = TokenLogprobs(token_id, logprob_of(before, token_id), 0.0, 1)
                result.logprobs[seq_id].append(entry)
                before = extended(before, token_id)

    def _draw(self, slot: Slot, drafts: list[int], number: int) -> tuple[list[int], bool]:
        """Tokens of the rows whose drafts stand."""
        masks = self.permitted.get(number)
        assert (masks is None) != slot.spec.params.constrained, "a grammar without its mask"
        value, tokens = slot.hashes[-1], []
        for row in range(len(drafts) + 1):
            token_id = drawn(value, slot.spec.seed, self.weights.number, self.vocab_size)
            if masks is not None and not masks[row, token_id >> 5] >> (token_id & 31) & 1:
                bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")[: self.vocab_size]
                allowed = np.flatnonzero(bits).tolist()
                if not allowed:
                    return [*tokens, 0], True
                token_id = allowed[(value + slot.spec.seed) % 1009 % len(allowed)]
            tokens.append(token_id)
            value = extended(value, token_id)
            if row == len(drafts) or drafts[row] != token_id:
                break
        return tokens, False

    def _drafts(self, slot: Slot, depth: int) -> list[int]:
        """Guesses of the next tokens, some of them right."""
        value, drafts = slot.hashes[-1], []
        for _ in range(depth):
            token_id = drawn(value, slot.spec.seed, self.weights.number, self.vocab_size)
            if value % 8 >= self.draft_quality:
                token_id = (token_id + 1) % self.vocab_size
            drafts.append(token_id)
            value = extended(value, token_id)
        return drafts

    def _report_prompt(self, slot: Slot, start: int, end: int, result: StepResult) -> None:
        spec = slot.spec
        if spec.params.prompt_logprobs is not None and start < spec.num_prompt - 1:
            result.prompt_logprobs[slot.seq_id] = [
                TokenLogprobs(slot.tokens[p + 1], logprob_of(slot.hashes[p], slot.tokens[p + 1]), 0.0, 1)
                for p in range(start, min(end, spec.num_prompt - 1))
            ]
        if spec.routed:
            result.routed[slot.seq_id] = self._experts(slot, start, end)

    def _experts(self, slot: Slot, start: int, end: int) -> RoutedExperts:
        rows = [experts_of(slot.hashes[p], self.weights.number) for p in range(start, end)]
        shape = (end - start, NUM_LAYERS, NUM_EXPERTS)
        return RoutedExperts(start, shape, np.array(rows, dtype="<i2").tobytes())

    def _compute(self, slot: Slot, start: int, end: int) -> None:
        """Check the keys before `start`, and write those up to `end`."""
        size = self.page_size
        for number, page in enumerate(slot.table[: -(-start // size)]):
            first, count = number * size, min(size, start - number * size)
            wanted = slot.hashes[first : first + count]
            assert self.rows[page, :count, 0].tolist() == wanted, f"keys of {slot.seq_id} in {page=} are another's"
            weights = set(self.rows[page, :count, 1].tolist())
            assert weights <= set(self.history[slot.num_changes :]), f"{slot.seq_id}: keys of {weights=}"
        for position in range(start, end):
            self._write(slot, position, slot.hashes[position])

    def _write(self, slot: Slot, position: int, value: int) -> None:
        number = position // self.page_size
        page = slot.table[number] if number < len(slot.table) else self.num_pages
        self.rows[page, position % self.page_size] = (value, self.weights.number)
