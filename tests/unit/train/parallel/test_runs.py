"""Whole runs of several processes: killed and gone on with, dealt out anew, and their weights in a running engine."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import glm5
from glm5.common.errors import ConfigError
from glm5.config.train import Recipe, read_recipe
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.testing.numerics import rel_rms
from glm5.train.loop import train
from glm5.train.metrics import read_metrics
from glm5.train.parallel.mesh import Mesh, check_stage
from glm5.train.parallel.run import Rank, train_distributed
from glm5.train.parallel.trainer import DistributedTrainer
from glm5.train.state import Store
from tests.support.sharded import run_ranks
from tests.support.tokenizers import tiny_tokenizer
from tests.support.training import recipe_file, stage, weights

SECONDS = 240
STAGES = (
    stage("dense", steps=4, pass_sequences=1),
    stage("sparse", "sparse", steps=4, pass_sequences=1),
)
# Of all weights together after eight steps in float64, some on one process, some on four, relative. In float32 no bound
# would hold: AdamW moves a weight whose gradient is nearly nothing by the sign of what was rounded.
ROUNDING = 1e-9


def settings(out, *more):
    return [f"out={out}", "checkpoints.every=2", "parallel.timeout_s=60", *more]


def wide(text: str) -> str:
    return text.replace("sequences = 2", "sequences = 4")


def read_exact(file: str | Path, changes: list[str]) -> Recipe:
    """The recipe, in float64."""
    found = read_recipe(file, changes)
    return found.model_copy(update={"model": found.model.model_copy(update={"dtype": "float64"})})


def here(rank: int, world: int, port: int) -> Rank:
    return Rank(rank, world, rank, "127.0.0.1", port, has_store=True)


def part_of_a_run(rank: int, port: int, world: int, file: str, changes: list[str], steps: int) -> str:
    """Train until `steps` more are done, then as if asked to stop."""
    done = 0

    def agree(self: DistributedTrainer, *, stop: bool) -> bool:
        nonlocal done
        done += 1
        return done == steps

    DistributedTrainer.agree = agree
    try:
        best = train_distributed(
            read_exact(file, changes), Path(file).parent, Rank(rank, world, rank, "127.0.0.1", port, True)
        )
    except KeyboardInterrupt:
        return "stopped"
    return str(best)


def apart(path, other) -> float:
    """Relative difference of two checkpoints' weights."""
    flat = [torch.cat([tensor.flatten() for tensor in glm5.load(each).state_dict().values()]) for each in (path, other)]
    off = rel_rms(*flat)
    print(f"{off:.1e} apart")
    return off


@pytest.mark.slow
def test_two_four_two_and_one_process_are_one_run(tmp_path):
    """Experts dealt out, stages and contexts in between; each reads the rows that others wrote."""
    file = recipe_file(tmp_path, *(wide(text) for text in STAGES))
    straight = train(read_exact(file, settings(tmp_path / "straight")), tmp_path)
    out = tmp_path / "out"
    ways = [(2, ["parallel.expert=2"]), (4, ["parallel.pipeline=2", "parallel.context=2"]), (2, ["parallel.context=2"])]
    for world, parallel in ways:
        results = run_ranks(world, part_of_a_run, world, str(file), settings(out, *parallel), 2)
        assert results == ["stopped"] * world
    found = Store(out, read_exact(file, settings(out))).read()
    assert found is not None
    assert (found[0].stage, found[0].step) == (1, 2)
    best = train(read_exact(file, settings(out)), tmp_path)
    assert apart(straight, best) < ROUNDING
    steps = [(r["stage"], r["step"]) for r in read_metrics(out) if "held out" not in r]
    assert steps == [("dense", n) for n in range(1, 5)] + [("sparse", n) for n in range(1, 5)]
    assert not list(out.glob("state-*"))


@pytest.mark.slow
def test_rows_that_do_not_divide_are_dealt_out_as_they_come(tmp_path):
    """A batch that grows from 2 to 5 sequences, over two processes."""
    text = stage("dense", steps=5, first_sequences=2, growing_steps=3).replace("sequences = 2\n", "sequences = 5\n", 1)
    file = recipe_file(tmp_path, text)
    straight = train(read_exact(file, settings(tmp_path / "straight")), tmp_path)
    results = run_ranks(2, part_of_a_run, 2, str(file), settings(tmp_path / "out"), 99)
    assert apart(straight, results[0]) < ROUNDING
    earlier = read_exact(file, settings(tmp_path / "short", "stage.0.steps=4"))
    assert apart(straight, train(earlier, tmp_path)) > 10 * ROUNDING
    tokens = [record["tokens"] for record in read_metrics(tmp_path / "out") if "held out" not in record]
    assert tokens == [64 * sum((2, 3, 4, 5, 5)[: n + 1]) for n in range(5)]
    with pytest.raises(ConfigError, match=r"3 sequences in step 2 are 1 of some ranks and 2 of others"):
        check_stage(Mesh(data=2), *_plan(file, "stage.0.pass_sequences=1"))


def _plan(file: Path, *more: str):
    plan = read_recipe(file, list(more))
    return plan.model.architecture(), plan.stage[0]


def launched(file: Path, out: Path, *more: str) -> subprocess.Popen:
    changes = [word for one in settings(out, *more) for word in ("--set", one)]
    command = [sys.executable, "-m", "glm5", "train", str(file), "--nproc", "2", *changes]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def child_of(pid: int, rank: int) -> int:
    """The process that is this rank."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        if f"RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError(f"{pid} has no rank {rank} among {children}")


def until(process: subprocess.Popen, line: str) -> str:
    assert process.stderr is not None
    seen = ""
    for text in process.stderr:
        seen += text
        if text.startswith(line):
            return seen
    raise AssertionError(seen)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_bits(tmp_path):
    file = recipe_file(tmp_path, *STAGES[:1])
    straight = launched(file, tmp_path / "straight")
    said = straight.communicate(timeout=SECONDS)
    assert straight.returncode == 0, said
    process = launched(file, tmp_path / "out")
    until(process, "dense 1/4: loss")
    os.kill(child_of(process.pid, 1), signal.SIGKILL)
    _, rest = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert re.search(r"glm5: error: rank 1 of 2 was ended by SIGKILL", rest), rest
    assert not (tmp_path / "out" / "dense" / "step-00000004").exists()
    again = launched(file, tmp_path / "out")
    _, rest = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, rest
    assert weights(tmp_path / "out" / "dense" / "last") == weights(tmp_path / "straight" / "dense" / "last")


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path):
    file = recipe_file(tmp_path, *STAGES[:1])
    process = launched(file, tmp_path / "out", "parallel.timeout_s=10")
    until(process, "dense 1/4: loss")
    os.kill(child_of(process.pid, 1), signal.SIGSTOP)
    _, rest = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert re.search(r"rank 0 waited for rank 1", rest), rest
    assert re.search(r"glm5: error: rank 1 of 2 hung: the others waited in vain", rest), rest


def pushing(rank: int, port: int, file: str, changes: list[str], folder: str) -> list[list[int]]:
    """The first rank has an engine of two ranks itself, of other weights at first."""
    from glm5.checkpoint.stream import push
    from glm5.train.parallel.gather import gather_tensors

    answers: list[list[int]] = []
    wrote = DistributedTrainer.export

    def export(self: DistributedTrainer, *given) -> None:
        wrote(self, *given)
        tensors, cfg = gather_tensors(self._shard, self.team), self.step.model.cfg
        if not self.is_first:
            assert next(tensors, None) is None
            return
        with LLM(folder, tensor_parallel_size=2, num_threads=1, max_model_len=64, max_num_seqs=2) as llm:
            answers.append(tokens_of(llm))
            push(tensors, cfg, llm, held=torch.float32)
            answers.append(tokens_of(llm))

    DistributedTrainer.export = export
    recipe = read_recipe(file, changes)
    train_distributed(recipe, Path(file).parent, here(rank, 2, port))
    return answers


def tokens_of(llm: LLM) -> list[int]:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7, 8]], greedy, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.slow
def test_weights_in_shards_go_into_a_running_engine(tmp_path):
    file = recipe_file(tmp_path, stage("dense", steps=2, pass_sequences=1))
    tiny_tokenizer().save(tmp_path / "assets")
    assets = f"model.tokenizer={tmp_path / 'assets'}"
    start = train(read_recipe(file, settings(tmp_path / "start", "seed=5", assets)), tmp_path)
    changes = settings(tmp_path / "out", "parallel.pipeline=2", assets)
    before, after = run_ranks(2, pushing, str(file), changes, str(start))[0]
    with LLM(str(start), num_threads=1) as llm:
        assert tokens_of(llm) == before
    with LLM(str(tmp_path / "out" / "dense" / "last"), num_threads=1) as llm:
        assert tokens_of(llm) == after
    assert before != after
