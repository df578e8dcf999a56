"""Sessions whose pages outlive pushes: what they find, which weights computed it, and what nobody finds.

(The exact versions of all keys under random schedules: test_scheduler_random.py.)
"""

import pytest
import torch

from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.config.engine import EngineConfig
from glm5.engine import weights
from glm5.engine.build import build_core
from glm5.engine.cache import prefix
from glm5.engine.frontend.outputs import Delta
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.scheduler import page_manager
from glm5.engine.scheduler.config import RestoreCost
from glm5.engine.transport.wire import AddRequest, ResetCacheCall, Updates, UpdateWeightsCall
from glm5.rl.segments import Segment
from tests.support.core_driver import CoreDriver
from tests.support.fake_runner import ended
from tests.support.models import random_model
from tests.support.updates import updates_of

PROMPT = torch.randint(4, 320, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    return [save(random_model(seed), root / str(seed)) for seed in (1, 2)]


class Turns:
    """Requests one after the other. The weights are those of `folders`, in turn."""

    def __init__(self, folders, first: int = 0, **config) -> None:
        config = {"max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 24} | config
        self.core = build_core(load(folders[first]), EngineConfig(**config))
        self.folders, self.version, self.updates, self.num_asked = folders, 0, [], 0

    def begin(self, prompt, session: str | None = "a", max_tokens: int = 30) -> None:
        self.num_asked += 1
        params = SamplingParams(max_tokens=None, logprobs=0, temperature=0.0)
        options = {} if session is None else {"salt": session.encode(), "keeps_pages": True}
        self.updates = []
        self.core.receive(AddRequest((self.num_asked,), list(prompt), params, (7,), max_tokens, **options))

    def turn(self) -> None:
        for message in self.core.step():
            self.updates += updates_of(message) if isinstance(message, Updates) else ()

    def ask(self, prompt, session: str | None = "a", max_tokens: int = 30) -> list[int]:
        self.begin(prompt, session, max_tokens)
        while self.core.has_work:
            self.turn()
        return [*prompt, *self.tokens]

    def push(self, policy="keep-session", max_key_age: int = 1) -> None:
        self.version += 1
        path = str(self.folders[self.version % 2])
        self.core.receive(UpdateWeightsCall(self.version, path, policy, self.version, max_key_age))
        while self.core.scheduler.version != self.version:
            self.turn()

    @property
    def tokens(self) -> list[int]:
        return [token_id for update in self.updates for token_id in update.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [entry.logprob for update in self.updates for entry in update.logprobs]

    @property
    def found(self) -> tuple[int, list[tuple[int, int]] | None]:
        """Prompt tokens found in the cache, and whose keys they are."""
        return self.updates[0].num_cached, self.updates[0].key_versions


def two_turns(folders) -> tuple[Turns, list[int]]:
    """A session whose second turn comes after a push; its tokens."""
    turns = Turns(folders)
    whole = turns.ask(PROMPT)
    turns.push()
    return turns, [*whole, *PROMPT[:10]]


def test_a_later_turn_finds_older_keys_and_says_whose(folders):
    turns, prompt = two_turns(folders)
    turns.ask(prompt)
    assert turns.found == (129, [(0, 129)])
    mixed = turns.logprobs
    # Of other sessions, and outside of sessions, nobody finds them: all is of the new weights.
    fresh = Turns(folders, first=1)
    fresh.ask(prompt, None)
    for session in ("b", None):
        turns.ask(prompt, session)
        assert turns.found[0] == 0
        assert turns.logprobs == fresh.logprobs
    assert mixed != fresh.logprobs, "the keys were not the older ones"


def test_keys_that_are_too_old_are_computed_again(folders):
    turns, prompt = two_turns(folders)
    whole = turns.ask(prompt)
    turns.push(max_key_age=2)
    longer = [*whole, *PROMPT[:5]]
    turns.ask(longer)
    assert turns.found == (len(whole) - 1, [(0, 129), (1, len(whole) - 130)])
    turns.push(max_key_age=2)
    turns.ask(longer)
    assert turns.found[0] == 0, "a page of weights of three pushes before was found"
    fresh = Turns(folders, first=1)
    fresh.ask(longer, None)
    assert turns.logprobs == fresh.logprobs


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_other_pushes_forget_the_pages_of_sessions(folders, policy):
    turns, prompt = two_turns(folders)
    turns.push(policy)
    turns.ask(prompt)
    assert turns.found[0] == 0


def test_a_reset_forgets_the_pages_of_sessions(folders):
    turns, prompt = two_turns(folders)
    turns.core.receive(ResetCacheCall(9))
    turns.ask(prompt)
    assert turns.found[0] == 0


def test_equal_weights_change_nothing(folders):
    """Pages that outlive a push hold what they held: with the same weights again the answer is the same."""
    plain, pushed = (Turns([folders[0], folders[0]]) for _ in range(2))
    prompt = [*plain.ask(PROMPT), *PROMPT[:10]]
    plain.ask(prompt)
    pushed.ask(PROMPT)
    pushed.push()
    pushed.ask(prompt)
    assert pushed.found == (129, [(0, 129)])
    assert pushed.logprobs == plain.logprobs


@pytest.mark.parametrize(("policy", "told"), [("keep-session", True), ("keep", True), ("recompute", False)])
def test_an_answer_under_way_says_whose_keys_it_goes_on_from(folders, policy, told, monkeypatch):
    monkeypatch.setattr(weights, "in_background", lambda job, _: ended(job()))
    turns = Turns(folders, async_scheduling=False)
    turns.begin(PROMPT)
    while len(turns.tokens) < 2:
        turns.turn()
    turns.push(policy)
    while turns.core.has_work:
        turns.turn()
    first = next(update for update in turns.updates if update.version)
    count = sum(len(update.token_ids) for update in turns.updates if not update.version)
    assert len(turns.tokens) == 30
    assert first.key_versions == ([(0, 99 + count)] if told else None)


def test_a_session_that_is_no_session_is_noticed(folders, monkeypatch):
    """Controls: salts that are equal, and pages that no push removes."""
    monkeypatch.setattr(page_manager, "session_salt", lambda _: b"session")
    turns, prompt = two_turns(folders)
    turns.ask(prompt, "b")
    assert turns.found[0] == 129
    monkeypatch.setattr(prefix.PrefixTree, "clear", lambda *_: None)
    for _ in range(5):
        turns.push(max_key_age=0)
    turns.ask(prompt)
    assert turns.found[0] >= 129


def test_pages_of_sessions_stay_on_the_device(tmp_path):
    """They would outlive the process, in whose next life a session of that name is another's."""
    for session, hits in ((True, 0), (False, 8)):
        for life in range(2):
            driver = CoreDriver(tiers=tmp_path / str(session), restore_cost=RestoreCost(0, 0, 0))
            driver.ask(11, 2, salt=b"a", keeps_pages=session)
            driver.run()
            assert driver.core.stats()["prefix_cache"]["hit_tokens"]["disk"] == (hits if life else 0)
            driver.core.close(30.0)


def test_an_answer_has_the_oldest_version_of_its_keys():
    segment = Segment([], is_sampled=True)
    for version, runs, ids in (
        (1, [(0, 7), (1, 2)], (5, 6)),  # found in the cache
        (1, None, (7,)),
        (2, [(0, 7), (1, 5)], (8,)),  # a push, with older pages
        (3, [], (9,)),  # and without
        (3, None, (9,)),
        (4, None, (9,)),  # all is computed again
    ):
        segment.add(Delta(ids, (), version=version, key_versions=runs, tempered_logprobs=(-1.0,) * len(ids)))
    segment.check()
    assert segment.versions == [1, 1, 1, 2, 3, 3, 4]
    assert segment.key_versions == [0, 0, 0, 0, 3, 3, 4]
    assert segment.context_versions == [(0, 7), (1, 2)]
