"""A device that a plan is launched on. Its "model" is a hash, so that every wrong key is seen and every token known.

The key of a position is (salt and whether it is a session's, hash of all tokens up to it, version of the weights). A
sequence's next token is a function of the hash and of its own seed. Before a row is computed all keys before it are
compared with what they must be. A launched step runs at once or as late as it can; copies to and from tiers run
whenever they may.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from random import Random

from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import Submit, Tier
from glm5.engine.scheduler.plan import Item, StepPlan, TierCopy

VOCAB = 11
Key = tuple[tuple[bytes, bool], int, int]
JUNK = ((b"junk", False), -1, -1)


def hashes(token_ids: Ids[int]) -> list[int]:
    """One for each position: of all tokens up to it."""
    value, found = 1, []
    for token_id in token_ids:
        value = (value * 1_000_003 + token_id + 7) % (2**61 - 1)
        found.append(value)
    return found


def next_token(last_hash: int, seed: int) -> int:
    return (last_hash * 2_654_435_761 + seed * 97) % (2**61 - 1) % VOCAB


def lone_run(submit: Submit, seq_id: int, max_model_len: int) -> list[int]:
    """The answer of a sequence that has a device to itself."""
    tokens = list(submit.prompt_ids)
    room = min(submit.max_tokens, max_model_len - len(tokens))
    value, answer = hashes(tokens)[-1], []
    while len(answer) < room:
        answer.append(next_token(value, seq_id))
        value = (value * 1_000_003 + answer[-1] + 7) % (2**61 - 1)
        if answer[-1] in submit.stop_ids and len(answer) >= submit.min_tokens:
            break
    return answer


@dataclass
class Slot:
    """`tokens` as the device knows them. `table` is the row of the page table; beyond it lies the dump page.
    `is_kept` since weights changed while it ran."""

    seq_id: int
    submit: Submit
    tokens: list[int]
    hashes: list[int]
    table: list[int]
    cap: int
    is_kept: bool = False

    @property
    def salt(self) -> tuple[bytes, bool]:
        return self.submit.salt, self.submit.keeps_pages

    def extend(self, token_ids: Ids[int]) -> None:
        self.tokens += token_ids
        value = self.hashes[-1]
        for token_id in token_ids:
            value = (value * 1_000_003 + token_id + 7) % (2**61 - 1)
            self.hashes.append(value)


class Device:
    """`acceptance`: probability that a draft is right."""

    def __init__(self, rng: Random, config: SchedulerConfig, *, is_lazy: bool, acceptance: float):
        self.rng, self.page_size, self.is_lazy, self.acceptance = rng, config.page_size, is_lazy, acceptance
        self.config = config
        self.pages: list[list[Key]] = [[JUNK] * config.page_size for _ in range(config.num_pages)]
        self.slots: dict[int, Slot] = {}
        self.submits: dict[int, Submit] = {}
        self.key_versions: dict[int, list[int]] = {}  # of sequences, as they were told last
        self.results: dict[int, dict[int, list[int]]] = {}
        self.tiers: dict[bytes, tuple[Tier, list[Key]]] = {}
        self.copies: dict[int, tuple[str, TierCopy]] = {}
        self.cancelled: set[int] = set()
        self._launched: list[StepPlan] = []

    def launch(self, plan: StepPlan, submits: Mapping[int, Submit]) -> None:
        """Steps run in order; the one before `plan` has run at the latest when `plan` is launched."""
        self.sync()
        self.submits.update(submits)
        for copy in plan.loads:
            self.copies[copy.copy_id] = "load", copy
        for copy in plan.stores:
            self.copies[copy.copy_id] = "store", copy
        self.cancelled.update(plan.cancelled)
        self._launched.append(plan)
        if not self.is_lazy or self.rng.random() < 0.5:
            self.sync()

    def sync(self) -> None:
        """Run what is launched."""
        launched, self._launched = self._launched, []
        for plan in launched:
            self._run(plan)

    def run_a_copy(self, copy_id: int) -> Tier | None:
        """Run one tier copy; where it found or put the page, None if it failed."""
        kind, copy = self.copies.pop(copy_id)
        if kind == "store":
            if self.rng.random() < 0.1:
                return None
            assert not any(key[0][1] for key in self.pages[copy.page]), "a session's page leaves the device"
            tier: Tier = self.rng.choice(("host", "disk"))
            self.tiers[copy.key.digest] = tier, list(self.pages[copy.page])
            return tier
        self.sync()
        if copy.key.digest not in self.tiers or self.rng.random() < 0.1:
            self.pages[copy.page] = [JUNK] * self.page_size
            return None
        tier, content = self.tiers[copy.key.digest]
        self.pages[copy.page] = list(content)
        return tier

    def sleep(self) -> dict[int, Tier | None]:
        """Lose all pages, after every copy has ended; the ends of copies."""
        self.sync()
        ended = {copy_id: self.run_a_copy(copy_id) for copy_id in list(self.copies)}
        self.pages = [[JUNK] * self.page_size for _ in self.pages]
        return ended

    def _run(self, plan: StepPlan) -> None:
        self.key_versions.update(plan.key_versions)
        for seq_id, slot, token_ids, pages, *_ in plan.entered:
            submit = self.submits[seq_id]
            known = seq_id, submit, list(token_ids), hashes(token_ids)
            self.slots[slot] = Slot(*known, list(pages), self.config.max_len(submit))
        for seq_id in plan.key_versions.keys() - {entry.seq_id for entry in plan.entered}:
            for state in self.slots.values():
                state.is_kept |= state.seq_id == seq_id
        for slot, column, page in plan.table:
            table = self.slots[slot].table
            assert column <= len(table), f"the page table of {slot=} has a gap before {column=}"
            table[column : column + 1] = [page]
        for source, target in plan.page_copies:
            self.pages[target] = list(self.pages[source])
        results = self.results[plan.step] = {}
        for item in plan.items:
            state = self.slots[item.slot]
            assert state.seq_id == item.seq_id, f"{item} in the slot of {state.seq_id}"
            sampled = self._chunk(item, state, plan)
            if sampled:
                results[item.seq_id] = sampled

    def _chunk(self, item: Item, state: Slot, plan: StepPlan) -> list[int]:
        if item.kind == "prefill":
            end = item.start + item.num_rows
            assert end <= len(state.tokens), f"{item} of {len(state.tokens)} tokens"
            assert item.samples == (end == len(state.tokens)), f"{item} of {len(state.tokens)} tokens"
            self._compute(state, item.start, end, plan.version)
            if not item.samples:
                return []
            num_gained = 1
        else:
            start = len(state.tokens) - 1
            assert start + item.num_rows <= plan.max_end, f"{item}, but the sequence begins at {start}"
            assert item.samples
            assert item.num_rows == 1 + item.depth
            num_gained = 1
            while num_gained <= item.depth and self.rng.random() < self.acceptance:
                num_gained += 1
        seed, answer = item.seq_id, []
        for _ in range(num_gained):
            answer.append(next_token(state.hashes[-1], seed))
            state.extend(answer[-1:])
        if item.kind == "decode":
            self._compute(state, start, start + num_gained, plan.version)
            for position in range(start + num_gained, start + item.num_rows):
                self._write(state, position, JUNK)
        # What the draft layer writes ahead.
        drafts = item.depth if item.kind == "decode" else self.rng.randint(0, self.config.max_depth)
        for position in range(len(state.tokens) - 1, len(state.tokens) + drafts - 2):
            self._write(state, position, JUNK)
        return answer

    def _compute(self, state: Slot, start: int, end: int, version: int) -> None:
        self.check_keys(state, start, version)
        for position in range(start, end):
            self._write(state, position, (state.salt, state.hashes[position], version))

    def check_keys(self, state: Slot, end: int, version: int) -> None:
        """All positions before `end` hold this sequence's keys, of the weights that the scheduler says.

        Beyond the table lies what nobody reads: tokens of sequences that have ended.
        """
        size = self.page_size
        told = self.key_versions.get(state.seq_id, [])
        versions = [*told, *[version] * (end - len(told))]
        for number, page in enumerate(state.table[: -(-end // size)]):
            keys = self.pages[page][: end - number * size]
            wanted = state.hashes[number * size : number * size + len(keys)]
            assert [key[1] for key in keys] == wanted, f"keys of {state.seq_id} in {page=} are another's"
            assert all(key[0] == state.salt for key in keys), f"{state.seq_id}: {keys}"
            told = versions[number * size : number * size + len(keys)]
            # What was under way when weights changed may come less far, by drafts and loads.
            for said, key in zip(told, keys, strict=True):
                assert said == key[2] or (said < key[2] <= version and state.is_kept), f"{state.seq_id}: {told} {keys}"

    def _write(self, state: Slot, position: int, key: Key) -> None:
        number = position // self.page_size
        if number < len(state.table):
            self.pages[state.table[number]][position % self.page_size] = key
        else:
            # All that is left to compute would have had a page: these tokens are beyond the answer's end.
            assert key is JUNK or position >= state.cap - 1, f"{state.seq_id}: no page for {position=}"
