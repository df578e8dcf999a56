"""The engine as a process of its own: whatever happens to it, those who wait learn why, and nothing is left behind."""

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from glm5.checkpoint.init import write_random
from glm5.cli.loading import load_llm
from glm5.common.errors import CheckpointError, ConfigError, EngineDead, RequestError
from glm5.common.watching import Silence
from glm5.config.engine import EngineConfig
from glm5.config.generate import GenerateConfig
from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams, StructuredOutputsParams
from glm5.engine.transport import link as link_module
from tests.support.cores import scripted_start

PLAIN = SamplingParams(max_tokens=8, ignore_eos=True)
GRAMMAR = StructuredOutputsParams(regex="a")
ENDLESS = PLAIN.but(max_tokens=None)
SECONDS = 60  # an upper limit for what takes a moment
WATCHDOG = 1.5  # seconds; a machine with more to do than it has cores for may be silent for one


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("process") / "tiny"
    write_random(preset("tiny"), path, seed=3)
    return str(path)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where sockets lie; a path as short as they need."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def scripted(checkpoint, temporary, monkeypatch):
    """Makes an LLM whose process has a scripted core; at the end, nothing is left of any of them."""
    made = []

    def make(script="ok", **engine) -> LLM:
        start = partial(scripted_start, script)
        monkeypatch.setattr("glm5.engine.llm.Start", start)
        made.append(LLM(checkpoint, **{"watchdog_timeout": SECONDS} | engine))
        return made[-1]

    yield make
    for llm in made:
        llm.client.link.kill()
        assert llm.client.link.process.poll() is not None
    assert list(temporary.iterdir()) == []


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_it_answers_and_ends_in_order(scripted, temporary):
    with scripted() as llm:
        assert ids(llm.generate([[5], [100]], PLAIN, use_tqdm=False)) == [list(range(6, 14)), list(range(101, 109))]
        assert llm.table[0] == ("cache", "16 pages")
        assert llm.stats()["pid"] == llm.client.link.pid != os.getpid()
        assert list(temporary.iterdir()) == []  # not even while it runs
    assert llm.client.link.process.returncode == 0
    with pytest.raises(EngineDead, match="it was closed"):
        llm.stats()
    llm.close()


def test_the_engines_own_refusals_are_raised_as_they_are(scripted, temporary):
    with pytest.raises(ConfigError, match=r"^max_model_len: got 9; allowed: up to 8$"):
        scripted("refuse")
    with pytest.raises(EngineDead, match="ValueError: a bug at the start"):
        scripted("broken")
    assert list(temporary.iterdir()) == []


def test_a_tokenizer_that_cannot_be_read_ends_the_process(checkpoint, temporary, monkeypatch, tmp_path):
    links = []
    monkeypatch.setattr("glm5.engine.llm.Start", partial(scripted_start, "ok"))
    monkeypatch.setattr(
        "glm5.engine.llm.ProcessLink",
        lambda *given, **more: links.append(link_module.ProcessLink(*given, **more)) or links[0],
    )
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        LLM(checkpoint, tokenizer=tmp_path)
    assert links[0].process.poll() is not None
    assert list(temporary.iterdir()) == []


def test_a_folder_without_a_tokenizer_takes_token_ids(checkpoint, tmp_path):
    """It samples the tokens of the same weights with a tokenizer; whatever needs one says so."""
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    params = SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
    with LLM(checkpoint) as whole, LLM(bare) as llm:
        ids, expected = (one.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0] for one in (llm, whole))
        assert ids.token_ids == expected.token_ids
        assert (ids.text, bool(expected.text)) == ("", True)
        for call, says in (
            (lambda: llm.generate("a"), r"prompt 0 is text and there is no tokenizer; give token ids, or LLM\("),
            (lambda: llm.chat([{"role": "user", "content": "a"}]), "a conversation needs a tokenizer"),
            (lambda: llm.generate([[1]], SamplingParams(structured_outputs=GRAMMAR)), "grammars need a token"),
            (lambda: llm.generate([[1]], SamplingParams(stop="a")), "stop strings need a tokenizer"),
        ):
            with pytest.raises(RequestError, match=says):
                call()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; copy the tokenizer files"):
        load_llm(GenerateConfig(model=str(bare)), EngineConfig())


@pytest.mark.parametrize("error", [OSError(11, "no more processes"), KeyboardInterrupt()], ids=["refused", "ctrl-c"])
def test_a_process_that_cannot_be_started_leaves_nothing(checkpoint, temporary, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(link_module.subprocess, "Popen", refuse)
    with pytest.raises(type(error)):
        LLM(checkpoint)
    assert list(temporary.iterdir()) == []


FAULTS = [
    ("raise@3", r"ValueError: a bug in a step \(exit code 1\)"),
    ("oom@3", r"MemoryError: no room; out of memory: lower gpu_memory_utilization .* \(exit code 1\)"),
    ("torch-oom@3", r"can't allocate memory: you tried 99 bytes; out of memory: lower .* \(exit code 1\)"),
    ("exit@3", "its process ended with exit code 5"),
    ("kill@3", r"its process was killed by SIGKILL \(by hand, or by the system for lack of memory\)"),
    ("hang@3", r"a step hung for .* s; watchdog_timeout allows 1.5 s.* \(exit code 71\)"),
    (
        "stop@3",
        r"its process sent no heartbeat for .* s \(watchdog_timeout is 1.5 s\); it was stopped( or hangs)?, and has",
    ),
]


@pytest.mark.parametrize(("script", "reason"), FAULTS, ids=[script for script, _ in FAULTS])
def test_faults_end_all_that_wait_and_all_that_come(scripted, script, reason):
    llm = scripted(script, watchdog_timeout=WATCHDOG)
    with pytest.raises(EngineDead, match=reason) as caught:
        llm.generate([[5], [100]], PLAIN, use_tqdm=False)
    assert caught.value.reason == llm.client.dead_because
    for call in (llm.stats, llm.pause, lambda: llm.generate([1], PLAIN), lambda: next(llm.stream([1], PLAIN))):
        with pytest.raises(EngineDead, match=reason):
            call()
    llm.close()
    assert llm.client.link.process.returncode != 0


@pytest.mark.parametrize("script", ["raise@3", "kill@3", "hang@3"])
def test_faults_under_asyncio(scripted, script):
    async def answer(engine, prompt):
        async with engine.generate(prompt, PLAIN) as deltas:
            return [token async for delta in deltas for token in delta.token_ids]

    async def main(engine):
        waiting = [asyncio.create_task(answer(engine, [i + 1])) for i in range(6)]
        waiting += [asyncio.create_task(engine.stats())] if script == "hang@3" else []
        failures = await asyncio.gather(*waiting, return_exceptions=True)
        late = await asyncio.gather(answer(engine, [1]), engine.pause(), engine.stats(), return_exceptions=True)
        return [*(failure for failure in failures if not isinstance(failure, dict)), *late]

    with AsyncEngine(scripted(script, watchdog_timeout=WATCHDOG)) as engine:
        failures = asyncio.run(main(engine))
        assert len(failures) >= 9
        assert {type(failure) for failure in failures} == {EngineDead}
        assert len({str(failure) for failure in failures}) == 1
        assert engine.stopped_because == failures[0].reason


def test_a_worker_killed_from_outside(scripted):
    llm = scripted("hang@9")  # otherwise the answer may have ended before this process hears of its beginning
    stream = llm.stream([1], ENDLESS)
    next(stream)
    os.kill(llm.client.link.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="killed by SIGKILL"):
        list(stream)


def test_a_worker_that_died_while_nobody_listened(scripted):
    llm = scripted()
    llm.generate([1], PLAIN, use_tqdm=False)
    os.kill(llm.client.link.pid, signal.SIGTERM)  # which is for its parent
    os.kill(llm.client.link.pid, signal.SIGUSR1)
    llm.client.link.process.wait(SECONDS)
    with pytest.raises(EngineDead, match="killed by SIGUSR1"):
        llm.generate([1], PLAIN, use_tqdm=False)


def test_an_idle_engine_that_dies_is_noticed_under_asyncio(scripted):
    with AsyncEngine(scripted()) as engine:
        os.kill(engine.llm.client.link.pid, signal.SIGKILL)
        engine._thread.join(SECONDS)
        assert "killed by SIGKILL" in engine.stopped_because


def test_an_engine_that_does_not_end_in_order_is_killed(scripted, monkeypatch):
    monkeypatch.setattr(link_module, "CLOSE_SECONDS", 0.2)
    llm = scripted("hang-at-close@0")
    llm.close()
    assert "killed as it did not end" in llm.client.dead_because
    with pytest.raises(EngineDead):
        llm.stats()


def test_ctrl_c_reaches_this_process_alone_and_the_engine_goes_on(scripted):
    llm = scripted()
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.stream([1], ENDLESS):
            os.kill(llm.client.link.pid, signal.SIGINT)  # as a terminal would, if they shared a process group
            signal.raise_signal(signal.SIGINT)
    assert os.getpgid(llm.client.link.pid) != os.getpgid(0)
    assert llm.client.num_unfinished == 0
    assert ids(llm.generate([5], PLAIN, use_tqdm=False)) == [list(range(6, 14))]
    assert llm.stats()["running"] == 0


PARENT = """
import sys
from functools import partial
from tests.support.cores import scripted_start
import glm5.engine.llm
glm5.engine.llm.Start = partial(scripted_start, "ok")
llm = glm5.engine.llm.LLM(sys.argv[1])
from glm5 import SamplingParams
stream = llm.stream([1], SamplingParams(max_tokens=None, ignore_eos=True))
next(stream)
sys.stdout.write(f"{llm.client.link.pid}\\n")
sys.stdout.flush()
"""


def run_parent(checkpoint, temporary, code) -> tuple[subprocess.Popen, int]:
    """A process with an LLM, and the id of its engine process."""
    environment = os.environ | {"TMPDIR": str(temporary)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT + code, checkpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=Path(__file__).parents[3],
        text=True,
    )
    return parent, int(parent.stdout.readline())


def ended(pid: int) -> bool:
    """Waits for a process that is nobody's child here."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], SECONDS)[0])
    finally:
        os.close(handle)


def test_the_engine_ends_with_a_parent_that_was_killed(checkpoint, temporary):
    parent, pid = run_parent(checkpoint, temporary, "sys.stdin.read()")
    with parent:
        parent.kill()
    assert ended(pid)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("code", ["", "raise RuntimeError('a bug of the script')", "del stream, llm; sys.stdin.read()"])
def test_a_script_that_closes_nothing_leaves_nothing(checkpoint, temporary, code):
    parent, pid = run_parent(checkpoint, temporary, code)
    with parent:
        if "read" not in code:
            assert parent.wait(SECONDS) == (1 if code else 0)
        assert ended(pid)
        parent.stdin.close()
    assert list(temporary.iterdir()) == []


LISTENING = "del stream; from glm5 import AsyncEngine; engine = AsyncEngine(llm); engine.start()"


@pytest.mark.parametrize("code", [LISTENING, f"{LISTENING}; raise RuntimeError('a bug of the script')"])
def test_a_script_that_ends_while_a_thread_listens(checkpoint, temporary, code):
    """What that thread uses is not taken away under it, which would end the script by a signal."""
    parent, pid = run_parent(checkpoint, temporary, code)
    with parent:
        assert parent.wait(SECONDS) == ("raise" in code)
    assert ended(pid)
    assert list(temporary.iterdir()) == []


def test_killed_while_another_thread_listens(scripted):
    with AsyncEngine(scripted()) as engine:
        engine.llm.client.link.kill()
        engine._thread.join(SECONDS)
        assert not engine.is_ready
        assert not engine._thread.is_alive()


def test_a_fork_of_the_client_does_not_end_the_engine(scripted):
    llm = scripted()
    pid = os.fork()
    if pid == 0:
        llm.client.link._finalizer()
        os._exit(0)
    os.waitpid(pid, 0)
    assert ids(llm.generate([5], PLAIN, use_tqdm=False)) == [list(range(6, 14))]


FORK = """
import os, signal
from glm5.common.errors import EngineDead
from glm5 import AsyncEngine
def refused(call):
    try:
        call()
    except EngineDead as error:
        assert "is a fork of" in str(error), error
    else:
        raise AssertionError(call)
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    for call in (lambda: list(stream), lambda: llm.generate([[1]], use_tqdm=False), llm.stats, llm.pause):
        refused(call)
    llm.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
stream.close()
engine = AsyncEngine(llm)
engine.start()
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    import asyncio
    refused(lambda: asyncio.run(engine.stats()))
    engine.close()
    sys.exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
import asyncio
assert asyncio.run(engine.stats())["pid"] == llm.client.link.pid
engine.close()
"""


def test_in_a_fork_the_engine_is_out_of_reach_and_nothing_waits(checkpoint, temporary):
    parent, pid = run_parent(checkpoint, temporary, FORK)
    with parent:
        assert parent.wait(SECONDS) == 0
    assert ended(pid)
    assert list(temporary.iterdir()) == []


def test_the_client_needs_no_torch(checkpoint, temporary):
    parent, pid = run_parent(checkpoint, temporary, "assert 'torch' not in sys.modules; llm.close()")
    with parent:
        assert parent.wait(SECONDS) == 0
    assert ended(pid)


def test_silence_is_as_long_as_was_waited_for():
    silence, long_ago = Silence(first=5, later=2), time.monotonic() - 1000  # this process was stopped meanwhile
    silence.wait(long_ago, 3)
    assert (silence.seconds, silence.is_too_long) == (3, False)
    silence.end()
    silence.wait(long_ago, 3)
    assert (silence.seconds, silence.is_too_long) == (3, True)
    silence.end()
    assert (silence.seconds, silence.is_too_long) == (0, False)
