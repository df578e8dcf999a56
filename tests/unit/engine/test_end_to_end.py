"""The engine as users have it: a checkpoint in a process of its own, aborts in every phase, and its faults.

What training loops ask of it is in test_training_calls.py.
"""

import os
import resource
import signal

import pytest

import glm5
from glm5.common.errors import EngineDead, RequestError
from glm5.engine.frontend.request_builder import Options
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams, StructuredOutputsParams
from tests.support.engines import assert_nothing_left, save_tiny
from tests.support.tokenizers import tiny_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = GREEDY.but(temperature=1.0, seed=5)
ENDLESS = GREEDY.but(max_tokens=None)
MAX_TURNS = 2000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("end-to-end") / "tiny", seed=11)


@pytest.fixture(scope="module")
def process(checkpoint):
    """One engine for the tests that leave it as it was."""
    with LLM(checkpoint, device="cpu", max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(checkpoint):
    return glm5.load(checkpoint, dtype="float32")


@pytest.fixture(scope="module")
def inline(model):
    """An engine in this process with two seats, whose turns a test can count."""
    with LLM(model, tiny_tokenizer(), max_num_seqs=2, max_num_batched_tokens=16, max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def lone(inline):
    """Answers of the prompts that are aborted or not, one after the other."""
    return [ids(inline.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in TestAborts.PROMPTS]


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_a_process_answers_what_this_process_does(process, model):
    prompts = ["the answer is", "x", [1, 2, 3] * 30, "Berlin"]
    with LLM(model, tiny_tokenizer(), max_num_seqs=4) as inline:
        for params in (GREEDY, SAMPLED, GREEDY.but(stop="a"), SAMPLED.but(n=2, logprobs=1)):
            got, want = (llm.generate(prompts, params, use_tqdm=False) for llm in (process, inline))
            for one, other in zip(got, want, strict=True):
                assert one.prompt_token_ids == other.prompt_token_ids
                assert [out.text for out in one.outputs] == [out.text for out in other.outputs]
                assert [out.token_ids for out in one.outputs] == [out.token_ids for out in other.outputs]
        assert {name for name, _ in inline.table} == {name for name, _ in process.table}


def test_a_grammar(process):
    pytest.importorskip("xgrammar")
    params = SAMPLED.but(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), ignore_eos=False)
    (out,) = process.generate("is it?", params, use_tqdm=False)
    assert out.outputs[0].text in ("yes", "no")
    bad = SAMPLED.but(structured_outputs=StructuredOutputsParams(regex="(["))
    with pytest.raises(RequestError, match="prompt 1: "):
        process.generate(["x", "is it?"], [GREEDY, bad], use_tqdm=False)
    assert ids(process.generate("x", GREEDY, use_tqdm=False))


class TestFaults:
    def test_a_worker_that_is_killed_while_it_answers(self, checkpoint):
        llm = LLM(checkpoint, device="cpu")
        stream = llm.stream([1, 2, 3], ENDLESS)
        next(stream)
        os.kill(llm.client.link.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="its process was killed by SIGKILL"):
            list(stream)
        with pytest.raises(EngineDead, match="SIGKILL"):
            llm.generate([1], GREEDY)

    def test_a_worker_without_memory(self, checkpoint):
        # Memory that malloc has set aside, 64 MiB a thread, is not enough for so many rows.
        llm = LLM(checkpoint, device="cpu", max_num_batched_tokens=64000, max_num_seqs=64)
        with open(f"/proc/{llm.client.link.pid}/statm") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.prlimit(llm.client.link.pid, resource.RLIMIT_AS, (now, now))
        with pytest.raises(EngineDead, match="out of memory: lower gpu_memory_utilization"):
            llm.generate([[i] * 1000 for i in range(64)], GREEDY, use_tqdm=False)
        llm.close()

    def test_a_damaged_disk_tier_and_then_a_full_one(self, checkpoint, process, tmp_path, rng):
        prompts = [[rng.randrange(320) for _ in range(300)] for _ in range(3)]
        want = ids(process.generate(prompts, GREEDY, use_tqdm=False))
        settings = {"device": "cpu", "kv_disk_dir": str(tmp_path), "num_gpu_blocks_override": 8, "max_num_seqs": 1}
        with LLM(checkpoint, **settings) as llm:
            assert ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == want
        files = sorted(tmp_path.rglob("*.page"))
        assert len(files) == 3 * 4
        for number, file in enumerate(files):
            content = bytearray(file.read_bytes())
            content[-9] ^= 1
            file.write_bytes(content if number % 2 else content[:-20])
        with LLM(checkpoint, **settings) as llm:
            assert ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == want
            assert llm.stats()["tiers"]["disk_damaged"] > 0
            # From now on no file gets longer than this, as if the disk were full.
            resource.prlimit(llm.client.link.pid, resource.RLIMIT_FSIZE, (100, 100))
            others = [[rng.randrange(320) for _ in range(300)] for _ in range(3)]
            llm.generate(others, GREEDY, use_tqdm=False)
            assert ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == want
            assert llm.stats()["tiers"]["disk_is_writable"] == 0
        assert llm.client.link.process.returncode == 0


class TestAborts:
    """In every phase: before the first step, in a prompt's chunks, while decoding, while nothing runs, at the end."""

    PROMPTS = [[7] * 50, [1, 2, 3], [9] * 3, [8] * 40, [4, 5]]

    @pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 4, 6, 9, 13, 18])
    def test_after_so_many_turns(self, inline, lone, num_turns):
        """Of five requests in two seats, three are left; the others answer as if they had been alone."""
        want = {i: lone[i] for i in (1, 4)}
        gained = {i: [] for i in range(5)}
        requested = []
        for i, prompt in enumerate(self.PROMPTS):
            params = SAMPLED.but(n=2, max_tokens=None) if i == 2 else GREEDY

            def note(_, stream, i=i):
                gained[i] += stream.take()

            requested.append(inline.client.submit(prompt, params, Options(), note))
        for _ in range(num_turns):
            inline.client.pump(0.1)
        for i in (0, 2, 3):
            inline.client.abort(requested[i])
        before = {i: len(gained[i]) for i in (0, 2, 3)}
        self.finish(inline)
        assert {i: len(gained[i]) for i in (0, 2, 3)} == before
        for i in (1, 4):
            assert [token for delta in gained[i] for token in delta.token_ids] == want[i]
        assert_nothing_left(inline)

    @pytest.mark.parametrize("phase", ["paused", "asleep", "compiling", "updating"])
    def test_while_nothing_is_computed(self, inline, model, phase):
        params = SAMPLED
        if phase == "paused":
            inline.pause()
        elif phase == "asleep":
            inline.sleep()
        elif phase == "compiling":
            pytest.importorskip("xgrammar")
            params = SAMPLED.but(structured_outputs=StructuredOutputsParams(regex="(a|b){1,60}c{2,50}"))
        requested = [inline.client.submit([1, 2], params, Options(), lambda *_: None) for _ in range(3)]
        inline.client.pump(0)
        if phase == "updating":
            updated = inline._calls.update_weights(dict(model.state_dict()), "recompute", None)
            inline.client.pump(0)
        for one in requested:
            inline.client.abort(one)
        if phase == "paused":
            inline.resume()
        elif phase == "asleep":
            inline.wake_up()
        elif phase == "updating":
            assert inline._wait(updated)["version"]
        assert ids(inline.generate([[1, 2]], GREEDY, use_tqdm=False))
        assert_nothing_left(inline)

    def finish(self, llm):
        for _ in range(MAX_TURNS):
            if not llm.client.num_unfinished:
                return
            llm.client.pump(0.1)
        raise AssertionError(f"{llm.client.num_unfinished} answers never ended")
