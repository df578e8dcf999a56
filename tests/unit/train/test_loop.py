"""The loop: stages to checkpoints that load; killed anywhere, a run goes on to the same bits; whatever fails is said,
and what was there before is there still."""

import json
import re
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

import glm5
from glm5.cli.main import main
from glm5.common.errors import DataError, TrainingError
from glm5.config.train import ModelSection, read_recipe
from glm5.model.indexer import Indexer
from glm5.train import loop, stage_trainer
from glm5.train.build import Builder
from glm5.train.data.tokens import writing
from glm5.train.metrics import MetricsLog, read_metrics
from glm5.train.sharded_state import read_parts
from glm5.train.state import Position, Store, clear
from glm5.train.step import Step
from tests.support.training import recipe, recipe_file, run, same, stage, state, weights

# A gradient is a sum of at most 1e4 roundings one after another (128 tokens through two layers, rows of up to 512), and
# clipped to norm 1. AdamW's first update, g / (|g| + 1e-8), multiplies its error by up to 1e8 and the rate of 3e-3;
# Muon's polynomials multiply it by up to 3.4445^5 = 485.
ROUNDING = 1e4 * torch.finfo(torch.float64).eps * 1e8 * 3e-3


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of six steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run(folder, "out")


def test_a_run_ends_in_a_checkpoint_that_loads(straight):
    folder, best = straight
    model = glm5.load(best)
    assert torch.isfinite(model.logits([1, 2, 3])).all()
    records = read_metrics(folder / "out")
    steps = [record for record in records if "held out" not in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["tokens"] == 6 * 2 * 64
    assert [record["step"] for record in records if "held out" in record] == [3, 6]
    assert "held-out loss" in (folder / "out" / "report.html").read_text()
    assert json.loads((folder / "out" / "recipe.json").read_text())["stage"][0]["steps"] == 6


def test_weights_are_written_in_files_of_the_size_asked_for(tmp_path):
    best = run(tmp_path, "out", stage(steps=1), settings=["checkpoints.max_shard_mb=0.2"])
    files = sorted(best.glob("*.safetensors"))
    assert len(files) > 2
    assert torch.isfinite(glm5.load(best).logits([1, 2, 3])).all()


def test_what_a_recipe_changes_of_a_checkpoints_config_reaches_every_layer(straight, tmp_path):
    _, best = straight
    model = {"checkpoint": str(best), "config": {"index_topk": 5}}
    wanted = recipe(tmp_path, "out").model_copy(update={"model": ModelSection.model_validate(model)})
    builder = Builder(wanted, tmp_path, tmp_path / "out")
    model = builder.model(torch.device("cpu"))
    indexers = [module for module in model.modules() if isinstance(module, Indexer)]
    assert {each.cfg.index_topk for each in [builder, model, *indexers]} == {5}


def test_sequences_beyond_the_models_positions_are_told(tmp_path, capsys, caplog):
    short = "model.config.max_position_embeddings=32"
    best = run(tmp_path, "out", stage(steps=1), settings=[short])
    said = "stage dense: seq_len 64 is above the 32 that max_position_embeddings says; its checkpoints will say 64"
    assert caplog.text.count(said) == 1
    assert glm5.load(best).cfg.max_position_embeddings == 64
    file = recipe_file(tmp_path, stage())
    for more, is_said in (([], True), (["--nproc", "2"], True), (["--set", "stage.0.rope_theta=5e4"], False)):
        assert main(["train", str(file), "--dry-run", "--set", short, *more]) == 0
        assert (said in capsys.readouterr().out) == is_said


def test_a_finished_run_says_so_at_once(straight, monkeypatch):
    folder, best = straight
    monkeypatch.setattr(Step, "run", lambda *_args: pytest.fail("trained again"))
    assert run(folder, "out") == best


def test_more_steps_after_the_end_give_the_bits_of_a_longer_run(tmp_path, caplog):
    """With a constant rate; one that falls jumps to that of the longer stage, which is told."""
    constant = stage(shape='"constant"')
    straight = run(tmp_path, "straight", constant)
    run(tmp_path, "out", constant, settings=["stage.0.steps=3"])
    assert state(tmp_path / "out", recipe(tmp_path, "out", constant, settings=["stage.0.steps=3"]))[0].done
    assert weights(run(tmp_path, "out", constant)) == weights(straight)
    assert [one["step"] for one in read_metrics(tmp_path / "out") if "lr" in one] == [1, 2, 3, 4, 5, 6]
    assert "learning rate" not in caplog.text
    with pytest.raises(TrainingError, match=r"another recipe: stage\.0\.steps was 6 and is 4"):
        run(tmp_path, "out", constant, settings=["stage.0.steps=4"])

    falls = [f"stage.0.{key}" for key in ("steps=2", "lr_warmup_steps=1")]
    run(tmp_path, "falls", settings=falls)
    run(tmp_path, "falls", settings=["stage.0.steps=4", falls[1]])
    rates = [one["lr"] for one in read_metrics(tmp_path / "falls") if "lr" in one]
    assert rates == pytest.approx([3e-3, 3e-3, 1.8e-3, 6e-4])  # the second as of 2 steps, the others as of 4
    assert "stage dense has 4 steps instead of 2: from step 3 on, the learning rate is that of 4 steps" in caplog.text
    assert "it goes from 0.003 to 0.0018" in caplog.text


def test_a_run_that_was_ended_without_its_weights_says_so(tmp_path):
    """As an earlier version left it."""
    of = recipe(tmp_path, "out")
    (tmp_path / "out").mkdir()
    Store(tmp_path / "out", of).write(Position(step=6, done=True), {}, {})
    assert Store(tmp_path / "out", of).read() is not None
    with pytest.raises(TrainingError, match=r"ended this run without keeping what more steps need.*model\.checkpoint"):
        run(tmp_path, "out", settings=["stage.0.steps=7"])


def test_killed_and_resumed_is_bitwise_the_same(straight, tmp_path):
    """Kill -9 in the middle of a step: the state is of step 3, steps 4 and 5 are done again."""
    _, best = straight
    command = [sys.executable, "-m", "glm5", "train", str(recipe_file(tmp_path)), "--set", f"out={tmp_path / 'out'}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:  # ends with the process, if it fails
        seen += line
        if line.startswith("dense 5/6: loss"):
            process.send_signal(signal.SIGKILL)
            break
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, seen
    assert not (tmp_path / "out" / "dense" / "step-00000006").exists()
    resumed = run(tmp_path, "out")
    assert weights(resumed) == weights(best)
    losses = [[r.get("loss", r.get("held-out loss")) for r in read_metrics(b.parents[1])] for b in (best, resumed)]
    assert losses[0] == losses[1]


def test_ctrl_c_ends_between_two_steps_and_the_run_goes_on(straight, tmp_path, monkeypatch):
    _, best = straight
    said = MetricsLog.step

    def interrupt(self, step, metrics):
        said(self, step, metrics)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(MetricsLog, "step", interrupt)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "out")
    assert signal.getsignal(signal.SIGINT) is before
    position, _ = state(tmp_path / "out", recipe(tmp_path, "out"))
    assert position.step == 2
    monkeypatch.undo()
    assert weights(run(tmp_path, "out")) == weights(best)


def test_stages_train_what_they_say_and_go_on_where_they_were_cut_off(tmp_path, monkeypatch):
    stages = [stage("a"), stage("b", "warmup", 2, rope_theta=5e4), stage("c", "sparse", 2), stage("d", "sft", 1)]
    best = run(tmp_path, "out", *stages)
    models = {name: glm5.load(tmp_path / "out" / name / "last").state_dict() for name in "abcd"}
    indexers = {name for name in models["a"] if ".indexer." in name}
    assert set(same(models["a"], models["b"])) == models["a"].keys() - indexers, "warm-up trains the indexers alone"
    assert not indexers & set(same(models["b"], models["c"]))
    assert "model.layers.0.self_attn.o_proj.weight" not in same(models["b"], models["c"])
    recalls = {r["stage"]: r["attention recall"] for r in read_metrics(tmp_path / "out") if "attention recall" in r}
    assert recalls.keys() == set("bcd")
    assert all(0 < recall < 1 for recall in recalls.values())
    assert glm5.load(best).cfg.rope_theta == 5e4, "what an earlier stage changed stays"

    started = loop._Stage.run

    def killed(self, ask):
        if self.stage.name == "c":
            raise RuntimeError("killed")
        started(self, ask)

    monkeypatch.setattr(loop._Stage, "run", killed)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path, "again", *stages)
    monkeypatch.undo()
    assert weights(run(tmp_path, "again", *stages)) == weights(best)


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path, monkeypatch):
    losses = iter([5.0, 1.0, 4.0, 3.0, 2.0])
    monkeypatch.setattr(stage_trainer, "held_out", lambda *_args: {"held-out loss": next(losses)})
    best = run(tmp_path, "out", stage(steps=5), settings=["checkpoints.every=1"])
    kept = sorted(path.name for path in (tmp_path / "out" / "dense").iterdir())
    assert kept == ["best", "last", "step-00000002", "step-00000004", "step-00000005"]
    assert best.resolve().name == "step-00000002"
    assert (best.parent / "last").resolve().name == "step-00000005"


def test_what_is_no_number_ends_the_run_with_its_state(tmp_path):
    """A rate of 1e30 makes weights of which the next loss is none."""
    with pytest.raises(
        TrainingError, match=r"stage dense, step \d, on needle row \d.*nothing was updated.*skip_steps=1"
    ):
        run(tmp_path, "out", settings=["stage.0.lr=1e30"])
    position, saved = state(tmp_path / "out", recipe(tmp_path, "out", settings=["stage.0.lr=1e30"]))
    assert 0 < position.step < 6
    assert len(saved["model"]) > 10


def test_a_step_can_be_left_out(straight, tmp_path, monkeypatch):
    _, best = straight
    done = Step.run
    calls = []

    def fail_once(self, batches, lr):
        calls.append(lr)
        if len(calls) == 2:
            raise TrainingError("loss is nan")
        return done(self, batches, lr)

    monkeypatch.setattr(Step, "run", fail_once)
    resumed = run(tmp_path, "out", settings=["skip_steps=1"])
    assert len(calls) == 6
    assert weights(resumed) != weights(best)
    assert "loss" not in read_metrics(tmp_path / "out")[1]


@contextmanager
def full_disk(num_bytes):
    """No file may grow beyond that, which fails as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("device", "threads", "number"), [("cuda", None, 4), ("cuda", 3, 3), ("cpu", None, 2)])
def test_threads_are_few_beside_a_gpu(tmp_path, monkeypatch, device, threads, number):
    wanted = recipe(tmp_path, "out").model_copy(update={"threads": threads})
    monkeypatch.setattr(loop, "device_of", lambda _name: torch.device(device))
    monkeypatch.setattr(loop, "current", nullcontext)  # there is no GPU
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    with loop.execution_settings(wanted):
        pass
    assert found == [number, 2]


def test_a_full_disk_loses_nothing(straight, tmp_path, monkeypatch):
    _, best = straight
    done = Step.run
    calls = []

    def stop_at_five(self, batches, lr):
        calls.append(lr)
        if len(calls) == 5:
            raise TrainingError("stop here")
        return done(self, batches, lr)

    monkeypatch.setattr(Step, "run", stop_at_five)
    with pytest.raises(TrainingError, match="stop here"):
        run(tmp_path, "out")
    monkeypatch.undo()
    before = (tmp_path / "out" / "state.pt").read_bytes()
    with full_disk(100_000), pytest.raises(TrainingError, match=r"step-00000006: .*(too large|No space).*same command"):
        run(tmp_path, "out")
    assert (tmp_path / "out" / "state.pt").read_bytes() == before
    assert not list((tmp_path / "out").rglob("*.part"))
    assert weights(run(tmp_path, "out")) == weights(best)


def test_the_state_cannot_be_written_either(tmp_path):
    with full_disk(1_000_000), pytest.raises(TrainingError, match=r"(state\.pt|step-\d+): .*failed: File too large"):
        run(tmp_path, "out", settings=["checkpoints.dtype=bfloat16"])
    assert not (tmp_path / "out" / "state.pt").exists()


def test_another_recipe_is_told_from_the_first(straight):
    folder, _ = straight
    with pytest.raises(TrainingError, match=r"holds a run of another recipe: stage\.0\.lr was 0\.003 and is 0\.5"):
        run(folder, "out", settings=["stage.0.lr=0.5"])


def test_a_damaged_state_is_named(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "state.pt").write_bytes(b"half")
    with pytest.raises(TrainingError, match=r"state\.pt cannot be read .*--restart"):
        run(tmp_path, "out")


@pytest.mark.parametrize(
    "state",
    [[], {"position": []}, {"position": {"stage": 3}, "recipe": '{"stage": []}', "threads": 1}, {"position": {}}],
)
def test_a_state_that_holds_something_else_is_named(tmp_path, state):
    (tmp_path / "out").mkdir()
    torch.save(state, tmp_path / "out" / "state.pt")
    with pytest.raises(TrainingError, match=r"state\.pt cannot be read .*--restart"):
        run(tmp_path, "out")


def test_a_damaged_part_of_a_state_is_named(tmp_path):
    (tmp_path / "state-0.pt").write_bytes(b"half")
    with pytest.raises(TrainingError, match=r"state-0\.pt cannot be read .*--restart"):
        read_parts({"parts": ["state-0.pt"]}, tmp_path)


@pytest.mark.parametrize("name", ["state.pt", "state-1.pt"])
def test_one_flipped_bit_of_a_tensor_is_told(tmp_path, name):
    weight = torch.linspace(0.1, 0.9, 99)
    Store(tmp_path, recipe(tmp_path, "out")).write(Position(), {"w": weight}, {})
    file = tmp_path / name
    (tmp_path / "state.pt").replace(file)
    content = file.read_bytes().replace(weight.numpy().tobytes(), (-weight).numpy().tobytes())
    file.write_bytes(content)
    with pytest.raises(TrainingError, match=rf"{name} cannot be read .it is damaged, first in .*data/0.*--restart"):
        _ = Store(tmp_path, recipe(tmp_path, "out")).read() or read_parts({"parts": [name]}, tmp_path)


def test_what_a_killed_process_had_begun_to_write_goes(tmp_path):
    begun = [".state.pt.0123abcd.part", "dense/.step-00000003.0123abcd.part/model.safetensors"]
    for name in (*begun, "state.pt", ".notes", "dense/.notes.part"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with loop.locked(tmp_path):
        left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"state.pt", ".notes", "dense", "dense/.notes.part", "run.lock"}


def test_restart_throws_packed_checkpoints_away(tmp_path):
    for name in ("step-00000002", "step-00000002-int4", ".step-00000002-int4.quantizing", "notes"):
        (tmp_path / "out" / "dense" / name).mkdir(parents=True)
    clear(tmp_path / "out", recipe(tmp_path, "out"))
    assert [path.name for path in (tmp_path / "out" / "dense").iterdir()] == ["notes"]


def test_two_processes_do_not_write_in_one_folder(tmp_path):
    with loop.locked(tmp_path / "out"), pytest.raises(TrainingError, match="another process of glm5 is writing there"):
        run(tmp_path, "out")


def test_restart_begins_anew(straight, tmp_path):
    _, best = straight
    run(tmp_path, "out", stage(steps=1))
    (tmp_path / "out" / "notes.txt").touch()
    again = loop.train(recipe(tmp_path, "out"), tmp_path, restart=True)
    assert weights(again) == weights(best)
    assert (tmp_path / "out" / "notes.txt").exists()
    assert len(read_metrics(tmp_path / "out")) == 8


def test_a_truncated_token_file_is_named_before_the_first_step(tmp_path):
    with writing(tmp_path / "tokens", 320) as writer:
        writer.add(list(range(300)) * 10)
    (tmp_path / "tokens" / "tokens.bin").write_bytes(b"\0" * 100)
    data = 'data = [{kind = "tokens", path = "tokens"}]'
    later = stage("later").replace('data = [{kind = "needle"}]', data)
    with pytest.raises(DataError, match=r"tokens\.bin is truncated: 100 bytes"):
        run(tmp_path, "out", stage(), later)
    assert not read_metrics(tmp_path / "out")


def test_files_that_were_mended_are_read_anew(tmp_path):
    (tmp_path / "text.txt").write_text("")
    data = """data = [{kind = "files", files = ["text.txt"], held_out = 0.2}]"""
    stages = stage("text").replace('data = [{kind = "needle"}]', data)
    of = recipe(tmp_path, "out", stages, settings=['model.tokenizer_files=["*.py"]'])
    (tmp_path / "some.py").write_text("one two three")
    builder = Builder(of, tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match=r"stage text, data 0: .* fewer than two of seq_len 64"):
        builder.rows(of.stage[0])
    (tmp_path / "text.txt").write_text("Something else. " * 200)
    builder.rows(of.stage[0])


def test_text_becomes_a_model_that_the_engine_serves(tmp_path):
    text = "It is said that the green boat waits at the old bridge. " * 60
    (tmp_path / "text.txt").write_text(text)
    data = """data = [{kind = "files", files = ["*.txt"], held_out = 0.2}, {kind = "ruler", tasks = ["qa_1"]}]"""
    stages = stage("text", steps=2).replace('data = [{kind = "needle"}]', data).replace("seq_len = 64", "seq_len = 256")
    settings = ['model.tokenizer_files=["*.txt"]']
    best = run(tmp_path, "out", stages, settings=settings)
    from glm5 import LLM, SamplingParams

    (output,) = LLM(str(best)).generate("It is", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3

    (tmp_path / "text.txt").write_text("Something else. " * 100)
    (tokens,) = (tmp_path / "out" / "data").glob("*/tokens.bin")
    before = tokens.read_bytes()
    of = recipe(tmp_path, "out", stages, settings=settings)
    Builder(of, tmp_path, tmp_path / "out").rows(of.stage[0])
    assert tokens.read_bytes() == before, "a run goes on with the tokens that it began with"


def learnt(folder: Path, pass_sequences: int, num_rows: int = 2) -> dict[str, torch.Tensor]:
    """The weights after a step in float64, on the first rows of a stage."""
    of = recipe(folder, "out", settings=[f"stage.0.pass_sequences={pass_sequences}"])
    of = of.model_copy(update={"model": of.model.model_copy(update={"dtype": "float64"})})
    builder, (one,) = Builder(of, folder, folder / "out"), of.stage
    learner = stage_trainer.StageTrainer(of, builder, None)
    step, rows = learner.begin(one, builder.cfg, None), builder.rows(one)
    step.run(learner.batches(one, [rows.row(draw) for draw in range(num_rows)]), one.lr)
    return learner.model.state_dict()


def test_passes_do_not_change_what_a_step_learns(tmp_path):
    """Sums over one pass of two sequences and over two of one differ by rounding; so do the weights. The control: a
    step that has lost a pass."""
    together, apart, half = (learnt(tmp_path, *given) for given in ((2,), (1,), (1, 1)))
    assert {tensor.dtype for name, tensor in apart.items() if name.endswith("weight")} == {torch.float64}
    apart_by, half_by = (
        max((together[name].double() - other[name].double()).abs().max().item() for name in together)
        for other in (apart, half)
    )
    print(f"{apart_by=:.1e} {half_by=:.1e} {ROUNDING=:.1e}")
    assert apart_by < ROUNDING < half_by / 100


def test_dry_run_says_what_a_recipe_needs(tmp_path, capsys):
    given = ["--set", "stage.0.steps=7", "parallel.expert=2"]
    assert main(["train", str(recipe_file(tmp_path)), "--dry-run", *given]) == 0
    said, warned = capsys.readouterr()
    assert "one process: [parallel] is left out" in warned
    assert re.search(r"stage dense \(pretrain\): 7 steps, 896 tokens", said)
    assert json.loads(said.partition("recipe:\n")[2])["stage"][0]["steps"] == 7
    assert not Path("runs/small").exists()


def test_the_command_line_reports_errors_in_one_line(tmp_path, capsys):
    file = recipe_file(tmp_path)
    assert main(["train", str(file), "--set", "seeed=1"]) == 1
    assert "seeed: no such key; did you mean seed?" in capsys.readouterr().err
    assert read_recipe(file).seed == 0
