"""The engine core over a real model: what training needs of it, checked against the model itself."""

import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from glm5.checkpoint import update as updating
from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.common.errors import CheckpointError, GlmError, RequestError
from glm5.config.engine import EngineConfig
from glm5.config.presets import preset
from glm5.engine import build, weights
from glm5.engine.build import build_core
from glm5.engine.cache.memory import Memory
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import (
    AddRequest,
    Answer,
    PauseCall,
    ResumeCall,
    SleepCall,
    Updates,
    UpdateWeightsCall,
    WakeCall,
)
from tests.support.checkpoints import edit_tensors
from tests.support.fake_runner import ended
from tests.support.models import random_model
from tests.support.rounding import logit_rounding
from tests.support.running import check_logprobs, experts_of
from tests.support.updates import updates_of

# Largest difference of a log-probability from the model's own, another order of sums, at temperatures from 0.7.
LOGPROB_BUDGET = logit_rounding(preset("tiny"), temperature=0.7)


class Session:
    """A core with some requests in it."""

    def __init__(self, model, source: Path | None = None, **config):
        defaults = {
            "max_model_len": 256,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "num_gpu_blocks_override": 16,
        }
        defaults |= {"enable_return_routed_experts": True, "async_scheduling": True}
        self.core = build_core(model, EngineConfig(**defaults | config), source=source)
        self.asks: dict[int, AddRequest] = {}
        self.updates: dict[int, list] = {}
        self.answers: dict[int, Answer] = {}

    def ask(self, num_prompt: int, max_tokens: int, *, routed: bool = False, **params) -> int:
        seq_id = len(self.asks)
        gen = torch.Generator().manual_seed(seq_id)
        prompt = torch.randint(4, 320, (num_prompt,), generator=gen).tolist()
        params = SamplingParams(**{"max_tokens": None, "logprobs": 2} | params)
        self.asks[seq_id] = AddRequest((seq_id,), prompt, params, (7 + seq_id,), max_tokens, routed_experts=routed)
        self.updates[seq_id] = []
        self.core.receive(self.asks[seq_id])
        return seq_id

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            for message in self.core.step():
                if isinstance(message, Updates):
                    for update in updates_of(message):
                        assert update.error is None
                        self.updates[update.seq_id].append(update)
                else:
                    self.answers[message.call_id] = message

    def run(self) -> None:
        while self.core.has_work:
            self.turn()

    def call(self, message) -> Answer:
        self.core.receive(message)
        while message.call_id not in self.answers:
            self.turn()
        return self.answers[message.call_id]

    def tokens(self, seq_id: int) -> list[int]:
        return [token_id for update in self.updates[seq_id] for token_id in update.token_ids]

    def versions(self, seq_id: int) -> list[int]:
        return [update.version for update in self.updates[seq_id] for _ in update.token_ids]

    def logprobs(self, seq_id: int) -> list:
        return [entry for update in self.updates[seq_id] for entry in update.logprobs]

    def whole(self, seq_id: int) -> list[int]:
        return self.asks[seq_id].prompt_ids + self.tokens(seq_id)


def own_logprobs(model, ids, temperature: float = 1.0):
    """Log-probabilities [T, W] that the model itself gives, of what follows each token."""
    return (model.logits(ids) / temperature).float().log_softmax(dim=-1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one architecture."""
    root = tmp_path_factory.mktemp("weights")
    return [save(random_model(seed), root / str(seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def models(folders):
    return [load(folder) for folder in folders]


@pytest.mark.parametrize(("launch_ahead", "depth"), [(True, 0), (True, 3), (False, 3)])
def test_logprobs_are_the_models_own(models, launch_ahead, depth):
    session = Session(load_copy(models[0]), async_scheduling=launch_ahead, num_speculative_tokens=depth)
    for number in range(6):
        session.ask(20 + 31 * number, 12, temperature=(0.0, 0.7, 1.0)[number % 3], prompt_logprobs=1)
    session.run()
    for seq_id, ask in session.asks.items():
        ids, num_prompt = session.whole(seq_id), len(ask.prompt_ids)
        plain = own_logprobs(models[0], ids)
        tempered = own_logprobs(models[0], ids, ask.params.temperature or 1.0)
        assert len(session.logprobs(seq_id)) == 12
        for position, entry in enumerate(session.logprobs(seq_id), start=num_prompt):
            assert entry.token_id == ids[position]
            check_logprobs(entry, plain[position - 1], LOGPROB_BUDGET)
            assert abs(entry.tempered - tempered[position - 1][ids[position]].item()) < LOGPROB_BUDGET
        (reported,) = [u.prompt_logprobs for u in session.updates[seq_id] if u.prompt_logprobs is not None]
        want = plain[: num_prompt - 1].gather(1, torch.tensor(ids[1:num_prompt])[:, None])[:, 0]
        assert max(abs(a.logprob - b) for a, b in zip(reported, want.tolist(), strict=True)) < LOGPROB_BUDGET


def test_prompts_are_cut_to_a_time_between_tokens(models):
    """On a CPU by what steps took; tokens are the same (tests/unit/engine/test_pace.py has the rest)."""
    cut, plain = (Session(load_copy(models[0]), max_inter_token_ms=ms) for ms in ("auto", None))
    for session in (cut, plain):
        assert session.core.config.max_prompt_tokens is None
        session.ask(20, 30, temperature=0.0)
        session.turn(3)
        session.ask(100, 4, temperature=0.0)
        session.run()
    assert (cut.core.pace.seconds, plain.core.pace) == (0.08, None)
    assert cut.core.scheduler.max_prompt_tokens >= 1
    assert plain.core.scheduler.max_prompt_tokens is None
    assert [cut.tokens(0), cut.tokens(1)] == [plain.tokens(0), plain.tokens(1)]


def test_the_budget_tells_other_weights(models):
    ids = list(range(4, 60))
    assert (own_logprobs(models[0], ids) - own_logprobs(models[1], ids)).abs().max() > 1000 * LOGPROB_BUDGET


def load_copy(model):
    """The same weights in a model of its own, which an update may overwrite."""
    copy = random_model(0)
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.parametrize("depth", [0, 3])
def test_routed_experts_are_the_routers(models, depth):
    """Under preemption, with several requests in a batch."""
    session = Session(load_copy(models[0]), num_speculative_tokens=depth, num_gpu_blocks_override=5)
    ids = [session.ask(50 + number, 40, routed=True, temperature=0.0) for number in range(4)]
    session.run()
    assert session.core.stats()["preemptions"]
    for seq_id in ids:
        whole = session.whole(seq_id)
        found = {}
        for update in session.updates[seq_id]:
            if update.routed is not None:
                rows = np.frombuffer(update.routed.experts, "<i2").reshape(update.routed.shape)
                for position, row in enumerate(rows, start=update.routed.start):
                    assert position not in found
                    found[position] = row
        assert sorted(found) == list(range(len(whole) - 1))
        want = experts_of(models[0], whole[:-1])
        got = np.stack([found[position] for position in range(len(whole) - 1)])
        assert np.array_equal(got, want)


@pytest.mark.parametrize("policy", ["recompute", "keep"])
@pytest.mark.parametrize(("launch_ahead", "depth"), [(True, 3), (False, 0)])
def test_weights_change_under_load(models, folders, policy, launch_ahead, depth, monkeypatch):
    monkeypatch.setattr(
        weights, "in_background", lambda job, _: ended(job())
    )  # by a busy thread it may take until all have ended
    # Prompts are never cut: the weights could change within one.
    config = {"num_speculative_tokens": depth, "max_num_batched_tokens": 256}
    session = Session(load_copy(models[0]), async_scheduling=launch_ahead, **config)
    for number in range(6):
        session.ask(30 + 9 * number, 24, temperature=0.0 if number % 2 else 1.0)
    session.turn(8)
    session.core.receive(UpdateWeightsCall(1, str(folders[1]), policy))
    session.run()
    assert session.answers[1].result == {"version": 1}
    both = 0
    for seq_id, ask in session.asks.items():
        versions, num_prompt = session.versions(seq_id), len(ask.prompt_ids)
        assert versions == sorted(versions)
        assert len(versions) == 24
        both += len(set(versions)) == 2
        ids = session.whole(seq_id)
        own = [own_logprobs(model, ids) for model in models]
        for position, entry in enumerate(session.logprobs(seq_id), start=num_prompt):
            version = versions[position - num_prompt]
            # What was kept of the old weights shows in later tokens; recomputed, a token knows the new ones alone.
            if version == 0 or policy == "recompute" or versions[0] == 1:
                assert abs(entry.logprob - own[version][position - 1, ids[position]].item()) < LOGPROB_BUDGET
    assert both > 1, "nothing was under way"
    # What comes later knows nothing of former weights.
    late = session.ask(50, 10)
    session.run()
    ids = session.whole(late)
    own = own_logprobs(models[1], ids)
    for position, entry in enumerate(session.logprobs(late), start=50):
        assert abs(entry.logprob - own[position - 1, ids[position]].item()) < LOGPROB_BUDGET


@pytest.fixture
def damaged(folders, tmp_path) -> Path:
    """The second checkpoint with NaN in it."""
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in folders[1].iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    edit_tensors(bad, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    return bad


def test_a_damaged_update_changes_nothing(models, damaged):
    session = Session(load_copy(models[0]))
    first = session.ask(30, 40, temperature=0.0)
    session.turn(6)
    answer = session.call(UpdateWeightsCall(1, str(damaged)))
    assert answer.kind == "CheckpointError"
    assert "NaN" in answer.error
    session.run()
    assert set(session.versions(first)) == {0}
    ids = session.whole(first)
    own = own_logprobs(models[0], ids)
    assert all(
        abs(e.logprob - own[29 + i, ids[30 + i]].item()) < LOGPROB_BUDGET for i, e in enumerate(session.logprobs(first))
    )


def test_a_damaged_update_leaves_no_memory_in_use(models, damaged, monkeypatch):
    """Nor until Python looks for cycles: what was read is as large as the weights."""
    read, is_finite = [], updating.is_finite

    def noting(tensor):
        read.append(weakref.ref(tensor))
        return is_finite(tensor)

    monkeypatch.setattr(updating, "is_finite", noting)
    session = Session(load_copy(models[0]))
    assert session.call(UpdateWeightsCall(1, str(damaged))).kind == "CheckpointError"
    assert read
    assert not any(tensor() is not None for tensor in read)


def greedy(model, num_prompt: int = 40, max_tokens: int = 50) -> list[int]:
    session = Session(model)
    seq_id = session.ask(num_prompt, max_tokens, temperature=0.0)
    session.run()
    return session.tokens(seq_id)


def test_pause_and_resume(models):
    want = greedy(load_copy(models[0]))
    session = Session(load_copy(models[0]))
    session.ask(40, 50, temperature=0.0)
    session.turn(9)
    assert session.call(PauseCall(1)).error is None
    count = len(session.tokens(0))
    session.turn(5)
    assert len(session.tokens(0)) == count
    session.call(ResumeCall(2))
    session.run()
    assert session.tokens(0) == want


def resident() -> int:
    """Bytes of this process in memory."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_the_memory_that_it_says(level, tmp_path):
    """And requests under way go on after it as if nothing had been."""
    cfg = preset("tiny").replace(vocab_size=16384, hidden_size=512)
    folder = save(random_model(3, cfg), tmp_path / "large", dtype="bfloat16")
    want = greedy(load(folder), max_tokens=20)
    session = Session(load(folder), source=folder, num_gpu_blocks_override=700)
    session.core.runner.cache._memory.bytes.view(-1)[::4096] = 0  # memory that nobody ever wrote to is not there
    session.ask(40, 20, temperature=0.0)
    session.turn(4)
    assert 0 < len(session.tokens(0)) < 20
    before = resident()
    said = session.call(SleepCall(1, level)).result["freed_bytes"]
    freed = before - resident()
    assert said > (20e6 if level == 1 else 55e6)
    assert freed > 0.9 * said, f"{freed=} {said=}"
    session.run()
    assert len(session.tokens(0)) < 20
    assert session.call(WakeCall(2)).error is None
    session.run()
    assert session.tokens(0) == want
    assert set(session.versions(0)) == {0}


def test_weights_that_cannot_be_read_again_leave_the_engine_asleep(models, folders, tmp_path):
    actual = tmp_path / "mine"
    actual.mkdir()
    for file in folders[0].iterdir():
        (actual / file.name).write_bytes(file.read_bytes())
    session = Session(load(actual), source=actual)
    session.ask(40, 50, temperature=0.0)
    session.turn(6)
    session.call(SleepCall(1, 2))
    (file,) = actual.glob("*.safetensors")
    content = file.read_bytes()
    file.unlink()
    assert session.call(WakeCall(2)).kind == "CheckpointError"
    session.turn(3)
    file.write_bytes(content)
    assert session.call(WakeCall(3)).error is None
    session.run()
    assert session.tokens(0) == greedy(load_copy(models[0]))


def test_a_wake_up_that_fails_gives_all_memory_back(folders, monkeypatch):
    """What anybody held of it, an allocator could not return."""
    taken, held = [], []

    def fail(parameters, *_, **__):
        taken.extend([weakref.ref(tensor) for tensor in parameters.values()])
        raise CheckpointError("the disk has gone")

    monkeypatch.setattr(updating, "read_weights", fail)
    monkeypatch.setattr(weights, "_return_freed", lambda _: held.append(sum(tensor() is not None for tensor in taken)))
    session = Session(load(folders[0]), source=folders[0])
    session.call(SleepCall(1, 2))
    assert session.call(WakeCall(2)).error == "the disk has gone"
    assert taken
    assert held == [0, 0]


def test_a_cache_for_which_there_is_no_memory_sleeps_on(models, monkeypatch):
    session = Session(load_copy(models[0]))
    session.ask(40, 50, temperature=0.0)
    session.turn(6)
    session.call(SleepCall(1))
    with monkeypatch.context() as patch:
        patch.setattr(Memory, "restore", out_of_memory)
        answer = session.call(WakeCall(2))
    assert answer.kind == "GlmError"
    assert answer.error == (
        "there is no memory for the cache (Tried to allocate 2.00 GiB); end what took it meanwhile, and call "
        "wake_up again"
    )
    session.turn(3)
    assert session.call(WakeCall(3)).error is None
    session.run()
    assert session.tokens(0) == greedy(load_copy(models[0]))


def out_of_memory(*_):
    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("level", [1, 2])
def test_weights_for_which_there_is_no_memory_stay_where_they_are(models, folders, monkeypatch, level):
    """On a GPU, where others may take what is given back: some tensors find a place, the next does not."""
    model, before = load_copy(models[0]), models[0].state_dict()
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))  # level 1 moves no weights of a CPU
    asleep = weights.Weights(model, folders[0])
    assert asleep.release(level) == sum(tensor.nbytes for tensor in before.values())
    monkeypatch.setattr(type(model), "device", torch.device("cpu"))
    new_empty, num_places = torch.Tensor.new_empty, iter(range(10**6))
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.Tensor,
            "new_empty",
            lambda self, size: new_empty(self, size) if size == 0 or next(num_places) < 5 else out_of_memory(),
        )
        with pytest.raises(GlmError, match="no memory for the weights"):
            asleep.restore()
    assert next(num_places) == 6
    assert not any(tensor.numel() for tensor in model.state_dict().values())
    asleep.restore()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_weights_that_are_not_a_checkpoints_alone_are_told_from_it(models, folders):
    """On disk their pages would be taken for each other's; and what was dropped could not be had again."""
    plain, made = (weights.Weights(load_copy(models[0]), folders[0], derived_from=of) for of in (b"", b"dummy"))
    again = weights.Weights(load_copy(models[0]), folders[0], derived_from=b"dummy")
    assert plain.identity != made.identity == again.identity
    plain.check_source()
    with pytest.raises(RequestError, match=r"random or with an adapter: .* use level 1"):
        made.check_source()
    of = EngineConfig(load_format="dummy"), EngineConfig(adapter=str(folders[0])), EngineConfig()
    assert [bool(build.derived_from(config)) for config in of] == [True, True, False]
    assert build.derived_from(of[0]) != build.derived_from(of[1])


def test_a_model_from_memory_keeps_its_weights(models):
    session = Session(load_copy(models[0]))
    assert session.call(SleepCall(1, 2)).kind == "RequestError"
    assert session.call(SleepCall(2, 1)).result == {"freed_bytes": 0}, "nothing was computed yet"
    session.call(WakeCall(3))
    session.ask(40, 50, temperature=0.0)
    session.turn(4)
    assert session.call(SleepCall(4, 1)).result["freed_bytes"] > 0
    session.call(WakeCall(5))
    session.run()
    assert session.tokens(0) == greedy(load_copy(models[0]))
