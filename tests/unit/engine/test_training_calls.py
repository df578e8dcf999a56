"""What a training loop asks of an engine in a process of its own, checked against the model itself.

Tokens in and out, log-probabilities, weight versions, routed experts, pause, sleep, and other weights under load.
"""

import asyncio
import copy
import itertools
import os
import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch

import glm5
from glm5.checkpoint.handover import Buffers, TensorStream, stream_of
from glm5.checkpoint.versions import WeightFolder
from glm5.common.errors import CheckpointError, EngineDead, GlmError, RequestError
from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.frontend.request_builder import Options
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from tests.support.cached import CachedRun
from tests.support.engines import save_tiny
from tests.support.rounding import logit_rounding
from tests.support.running import experts_of, logprobs_of
from tests.support.tokenizers import tiny_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = GREEDY.but(temperature=0.7, seed=5)
ENDLESS = GREEDY.but(max_tokens=None, logprobs=0)
# Float32 on the CPU in both; the batch differs. The temperature is 0.7.
LOGPROB_BUDGET = logit_rounding(preset("tiny"), temperature=0.7)
MAX_TURNS = 2000


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one architecture, whose indexers select all keys: which eight of them is decided by rounding
    in one answer of eighty, of 600 tokens. Without that choice none of 160 answers differed."""
    root = tmp_path_factory.mktemp("training")
    return [save_tiny(root / str(seed), seed, index_topk=4096) for seed in (11, 12)]


@pytest.fixture(scope="module")
def models(folders):
    return [glm5.load(folder, dtype="float32") for folder in folders]


@pytest.fixture(scope="module")
def llm(folders):
    """Tests leave it with the first weights, and nothing running."""
    with LLM(folders[0], device="cpu", max_num_seqs=4, enable_return_routed_experts=True) as llm:
        yield llm


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(answer):
    return torch.tensor([entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)])


def chosen(logprob_TW, tokens):
    return logprob_TW.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def largest(difference) -> float:
    return difference.abs().max().item()


def test_tokens_in_tokens_out_with_log_probabilities_and_experts(llm, models):
    prompt = tiny_tokenizer().encode("the weather in")
    params = SAMPLED.but(logprobs=0, prompt_logprobs=0, max_tokens=20)
    (out,) = llm.generate(prompt, params, use_tqdm=False, routed_experts=True)
    answer, whole = out.outputs[0], prompt + out.outputs[0].token_ids
    assert out.prompt_token_ids == prompt
    assert len(answer.token_ids) == 20
    row_TW = logprobs_of(models[0], whole[:-1])
    own, tempered = chosen(row_TW, whole[1:]), chosen((row_TW / 0.7).log_softmax(-1), whole[1:])
    first = len(prompt) - 1
    assert largest(logprobs(answer) - own[first:]) < LOGPROB_BUDGET
    assert largest(torch.tensor(answer.tempered_logprobs) - tempered[first:]) < LOGPROB_BUDGET
    reported = torch.tensor([next(iter(entry.values())).logprob for entry in out.prompt_logprobs[1:]])
    assert largest(reported - own[:first]) < LOGPROB_BUDGET
    assert np.array_equal(answer.routed_experts, experts_of(models[0], whole[:-1]))
    assert answer.weight_versions == [0] * 20
    # An answer that was cut off goes on as if it had not been: what came out goes in, and is never spelled anew.
    (rest,) = llm.generate(whole[: len(prompt) + 7], params.but(max_tokens=13), use_tqdm=False)
    assert rest.outputs[0].token_ids == answer.token_ids[7:]
    assert largest(logprobs(rest.outputs[0]) - own[first + 7 :]) < LOGPROB_BUDGET


def test_pause_and_resume(llm):
    stream = llm.stream([1, 2], ENDLESS)
    next(stream)
    llm.pause()
    steps = llm.stats()["steps"]
    assert llm.stats()["steps"] == steps
    llm.resume()
    assert next(stream).token_ids
    llm.abort_all()
    assert [delta.finish_reason for delta in stream][-1] == "abort"


def resident_bytes(llm) -> int:
    """Of the engine's process."""
    with open(f"/proc/{llm.client.link.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_what_it_says_and_answers_stay(llm, rng, level):
    prompts = [[rng.randrange(320) for _ in range(700)] for _ in range(4)]
    before = ids(llm.generate(prompts, GREEDY, use_tqdm=False))
    resident = resident_bytes(llm)
    freed = llm.sleep(level)
    assert freed > 2e6
    assert resident - resident_bytes(llm) > 0.9 * freed
    assert llm.sleep(level) == 0
    llm.wake_up()
    assert ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == before


def test_weights_change_between_the_halves_of_waking_up(llm, models, folders):
    """As vLLM's training loops do it: the new weights are there before the cache takes its memory."""
    first = llm.update_weights(folders[0])
    load = Load(llm, [[1, 2, 3], [9] * 40])
    load.until(lambda: all(load.gained))
    llm.sleep(2)
    assert llm.stats()["is_sleeping"]
    with pytest.raises(GlmError, match=r"call wake_up\(tags=\['weights'\]\)"):
        llm.update_weights(folders[1])
    with pytest.raises(GlmError, match="call wake_up"):
        llm.resume()
    llm.wake_up(tags=["weights"])
    second = llm.update_weights(dict(models[1].state_dict()))
    llm.wake_up(tags=["kv_cache"])
    assert not llm.stats()["is_sleeping"]
    load.until(lambda: all(load.versions(i).count(second) > 5 for i in range(2)))
    load.end()
    for i, prompt in enumerate(load.prompts):
        tokens, versions = load.tokens(i), load.versions(i)
        new, num_old = logprobs_of(models[1], prompt + tokens[:-1])[len(prompt) - 1 :], versions.count(first)
        assert versions == [first] * num_old + [second] * (len(tokens) - num_old)
        assert largest(load.logprobs(i)[num_old:] - chosen(new, tokens)[num_old:]) < LOGPROB_BUDGET
    llm.update_weights(folders[0])


class Load:
    """Requests without an end, and all that they gain. There are fewer seats than requests."""

    def __init__(self, llm, prompts):
        self.llm, self.prompts = llm, prompts
        self.gained = [[] for _ in prompts]
        self.requests = [
            llm.client.submit(prompt, ENDLESS, Options(), partial(self._gain, i)) for i, prompt in enumerate(prompts)
        ]

    def _gain(self, i, _, item):
        self.gained[i] += [item] if isinstance(item, EngineDead) else item.take()

    def tokens(self, i):
        return [token for delta in self.gained[i] for token in delta.token_ids]

    def versions(self, i):
        return [delta.version for delta in self.gained[i] for _ in delta.token_ids]

    def logprobs(self, i):
        return torch.tensor([next(iter(e.values())).logprob for delta in self.gained[i] for e in delta.logprobs])

    def until(self, is_enough):
        for _ in range(MAX_TURNS):
            if is_enough():
                return
            self.llm.client.pump(0.1)
        raise AssertionError("no end in sight")

    def end(self):
        for request in self.requests:
            self.llm.client.abort(request)


def kept_logprobs(old, new, whole, num_old):
    """Log-probabilities after each token, had the first `num_old` tokens been computed by other weights."""
    run = CachedRun(old, [whole])
    run.advance({0: num_old})
    run.model = new
    return run.finish().logits().log_softmax(-1)


@pytest.mark.parametrize("source", ["folder", "tensors"])
@pytest.mark.parametrize("policy", ["keep", "recompute", "abort"])
def test_weights_change_under_load(llm, models, folders, rng, policy, source):
    """Every token is what the weights of its version make of what they were to see of those before."""
    first = llm.update_weights(folders[0])
    load = Load(llm, [[rng.randrange(320) for _ in range(length)] for length in (5, 40, 90, 20, 30, 50)])
    load.until(lambda: sum(len(gained) >= 3 for gained in load.gained) >= 4)
    new = folders[1] if source == "folder" else dict(models[1].state_dict())
    second = llm.update_weights(new, policy=policy)
    assert second == first + 1
    if policy == "abort":
        load.until(lambda: not llm.client.num_unfinished)
        assert [gained[-1].finish_reason for gained in load.gained] == ["abort"] * 6
    else:
        load.until(lambda: sum(load.versions(i).count(second) >= 6 for i in range(6)) >= 4)
    load.end()
    for i, prompt in enumerate(load.prompts):
        tokens, versions = load.tokens(i), load.versions(i)
        num_old = versions.count(first)
        assert versions == [first] * num_old + [second] * (len(tokens) - num_old)
        if not tokens:
            continue
        whole, start = prompt + tokens[:-1], len(prompt) - 1
        old, new = (logprobs_of(model, whole) for model in models)
        if policy == "keep" and num_old:
            kept = kept_logprobs(*models, whole, start + num_old)
            assert largest((kept - new)[start + num_old :]) > 100 * LOGPROB_BUDGET  # the control: it shows
            new = kept
        want = torch.cat([chosen(rows[start:], tokens)[part] for rows, part in
                          ((old, slice(num_old)), (new, slice(num_old, None)))])  # fmt: skip
        assert largest(load.logprobs(i) - want) < LOGPROB_BUDGET
    assert sum(set(load.versions(i)) == {first, second} for i in range(6)) == (0 if policy == "abort" else 4)
    (late,) = llm.generate([[1, 2, 3]], GREEDY.but(logprobs=0), use_tqdm=False)
    own = chosen(logprobs_of(models[1], [1, 2, 3, *late.outputs[0].token_ids[:-1]])[2:], late.outputs[0].token_ids)
    assert largest(logprobs(late.outputs[0]) - own) < LOGPROB_BUDGET
    assert late.outputs[0].weight_versions == [second] * 12
    llm.update_weights(folders[0])


def test_changes_of_a_folder_under_load(llm, models, tmp_path):
    """Versions of a folder replace weights while requests run, and changes to other weights are refused."""
    sender, first = WeightFolder(tmp_path, deltas=True), llm.stats()["weight_version"] + 1
    llm.update_weights(sender.publish(models[0].state_dict(), first), version=first)
    whole = llm.stats()["last_push"]["bytes"]
    load = Load(llm, [[1, 2, 3], [9] * 40])
    load.until(lambda: all(load.gained))
    theirs = copy.deepcopy(models[0])
    with torch.no_grad():
        theirs.lm_head.weight[:, ::7] *= 1.5
    second = llm.update_weights(sender.publish(theirs.state_dict(), first + 1), version=first + 1)
    assert llm.stats()["last_push"]["bytes"] < 0.05 * whole
    load.until(lambda: all(load.versions(i).count(second) > 5 for i in range(2)))
    llm.update_weights(dict(models[0].state_dict()))  # another way
    late = sender.publish(models[1].state_dict(), second + 2)
    with pytest.raises(CheckpointError, match="changes to other weights than those in use"):
        llm.update_weights(late, version=second + 2)
    assert llm.stats()["weight_version"] == second + 1
    assert llm.update_weights(sender.whole(), version=second + 2) == second + 2
    load.until(lambda: all(load.versions(i).count(second + 2) > 5 for i in range(2)))
    load.end()
    for i, prompt in enumerate(load.prompts):
        tokens, versions = load.tokens(i), load.versions(i)
        by_version = {first: models[0], second: theirs, second + 1: models[0], second + 2: models[1]}
        for version, model in by_version.items():
            own = chosen(logprobs_of(model, prompt + tokens[:-1])[len(prompt) - 1 :], tokens)
            places = [place for place, one in enumerate(versions) if one == version]
            assert not places or largest(load.logprobs(i)[places] - own[places]) < LOGPROB_BUDGET
    llm.update_weights(dict(models[0].state_dict()))


def test_an_update_that_fails_changes_nothing(llm, models, folders, tmp_path):
    version = llm.update_weights(folders[0], version=70)
    load = Load(llm, [[1, 2, 3], [9] * 40])
    load.until(lambda: all(load.gained))
    bad = dict(models[1].state_dict())
    bad["model.norm.weight"] = torch.full_like(bad["model.norm.weight"], float("nan"))
    with pytest.raises(CheckpointError, match="NaN or infinity; nothing was replaced"):
        llm.update_weights(bad, policy="abort")
    with pytest.raises(CheckpointError, match=r"^the update does not fit the model in use"):
        llm.update_weights({"model.norm.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        llm.update_weights(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="version is 70; allowed: more than 70"):
        llm.update_weights(folders[1], version=70)
    with pytest.raises(CheckpointError, match="holds neither"):
        llm.update_weights(tmp_path)
    counts = [len(gained) for gained in load.gained]
    load.until(lambda: all(len(gained) > count + 3 for gained, count in zip(load.gained, counts, strict=True)))
    load.end()
    for i, prompt in enumerate(load.prompts):
        tokens = load.tokens(i)
        assert set(load.versions(i)) == {version}
        own = chosen(logprobs_of(models[0], prompt + tokens[:-1])[len(prompt) - 1 :], tokens)
        assert largest(load.logprobs(i) - own) < LOGPROB_BUDGET


def cut(stream: TensorStream, length: int) -> TensorStream:
    """A stream whose source is lost after so many tensors."""

    def tensors():
        yield from itertools.islice(stream.tensors, length)
        raise RuntimeError("the trainer was lost")

    return TensorStream(stream.layout, tensors())


def test_a_push_that_fails_midway_stops_all_requests_until_a_whole_version_has_come(llm, models):
    load = Load(llm, [[1, 2, 3], [9] * 40])
    load.until(lambda: all(load.gained))
    new, version = stream_of(models[1].state_dict()), llm.stats()["weight_version"]
    with pytest.raises(CheckpointError, match=r"RuntimeError: the trainer was lost; .* requests wait"):
        llm.update_weights(cut(new, len(new.layout) // 2))
    steps = llm.stats()["steps"]
    late = Load(llm, [[5, 6]])
    for tensors in ({"model.norm.weight": models[1].model.norm.weight}, cut(stream_of(models[1].state_dict()), 3)):
        with pytest.raises(CheckpointError, match="requests wait"):
            llm.update_weights(tensors)
    assert llm.stats()["weights_are_torn"]
    assert llm.stats()["steps"] == steps
    assert not late.gained[0]
    assert llm.update_weights(dict(models[1].state_dict())) == version + 1
    late.until(lambda: len(late.gained[0]) > 5 and all(load.versions(i).count(version + 1) > 5 for i in range(2)))
    stats = llm.stats()
    assert stats["last_push"]["bytes"] == sum(tensor.nbytes for tensor in models[1].state_dict().values())
    for each in (load, late):
        each.end()
    for each, i in ((load, 0), (load, 1), (late, 0)):
        tokens, prompt, num_old = each.tokens(i), each.prompts[i], each.versions(i).count(version)
        own = chosen(logprobs_of(models[1], prompt + tokens[:-1])[len(prompt) - 1 :], tokens)
        assert largest(each.logprobs(i)[num_old:] - own[num_old:]) < LOGPROB_BUDGET
    llm.update_weights(dict(models[0].state_dict()))


def test_a_push_that_its_caller_cancels_fails(llm, models):
    """Its tensors may change from then on. Without pumping, no more than two of its buckets are on their way."""
    assert llm._calls.update_weights(dict(models[1].state_dict()), "recompute", None).cancel()
    assert any(llm.stats()["weights_are_torn"] for _ in range(MAX_TURNS))
    version = llm.update_weights(dict(models[0].state_dict()))
    (out,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert set(out.outputs[0].weight_versions) == {version}


def test_an_update_that_fails_halfway_ends_the_engine_with_the_reason(models, folders, monkeypatch):
    """Nobody is served by half of them: some were replaced, and the others cannot be."""

    def half(model, staged):
        next(model.parameters()).data.zero_()
        raise RuntimeError("the device was lost")

    monkeypatch.setattr("glm5.engine.weights.replace", half)
    llm = LLM(glm5.load(folders[0], dtype="float32"), max_num_seqs=4)
    load = Load(llm, [[1, 2, 3], [4, 5]])
    load.until(lambda: all(load.gained))
    counts = [len(gained) for gained in load.gained]
    with pytest.raises(EngineDead, match="RuntimeError: the device was lost"):
        llm.update_weights(folders[1], policy="keep")
    for gained, count in zip(load.gained, counts, strict=True):
        assert isinstance(gained[-1], EngineDead)
        assert {delta.version for delta in gained[count:-1]} <= {0}
    with pytest.raises(EngineDead, match="the device was lost"):
        llm.generate([[1]], GREEDY)


def test_under_asyncio_until_the_worker_is_killed_in_an_update(folders, models, monkeypatch):
    """Requests go on through calls; whoever waits when the process dies learns of it, and no memory is held."""
    buffers, fill = [], Buffers.fill
    monkeypatch.setattr(Buffers, "fill", lambda self, *given: buffers.append(self) or fill(self, *given))

    async def versions(engine, number, first_came):
        seen = []
        async with engine.generate([number + 1] * 9, ENDLESS) as deltas:
            async for delta in deltas:
                seen.append(delta.version)
                if not first_came[number].done():
                    first_came[number].set_result(None)
                if delta.version == 1 and number % 2:
                    return seen
        return seen

    async def main(engine):
        came = [asyncio.get_running_loop().create_future() for _ in range(4)]
        tasks = [asyncio.create_task(versions(engine, i, came)) for i in range(4)]
        await asyncio.gather(*came)
        await engine.pause()
        assert await engine.update_weights(dict(models[1].state_dict()), policy="recompute") == 1
        await engine.resume()
        for task in tasks[1::2]:
            seen = await task
            assert seen == sorted(seen)
            assert set(seen) == {0, 1}
        assert await engine.sleep() > 0
        await engine.wake_up()
        os.kill(engine.llm.client.link.pid, signal.SIGSTOP)
        update = asyncio.create_task(engine.update_weights(dict(models[0].state_dict())))
        while len(set(buffers)) < 2:
            await asyncio.sleep(0)
        os.kill(engine.llm.client.link.pid, signal.SIGKILL)
        ends = await asyncio.gather(*tasks[::2], update, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDead] * 3
        assert all("killed by SIGKILL" in str(end) for end in ends)

    with AsyncEngine(str(folders[0]), device="cpu", max_num_seqs=4) as engine:
        asyncio.run(asyncio.wait_for(main(engine), 60))
    assert len(set(buffers)) == 2
    for thread in threading.enumerate():
        if thread.name == "glm5-push":
            thread.join(60)
    assert not any(one.descriptors for one in buffers)
