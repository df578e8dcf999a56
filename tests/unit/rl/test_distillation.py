"""Distillation: its formulas, engines of teachers that take turns, what is refused, and whole runs."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from glm5.chat.tokenizer import train_bpe
from glm5.checkpoint.save import save
from glm5.common.errors import ConfigError, EngineDead, TrainingError
from glm5.config.model import ModelConfig
from glm5.config.rl import TeacherSection
from glm5.config.step import OptimizerConfig
from glm5.kernels.sampled_logprobs import kept_ids
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.rl.algorithms.distillation import top_k_kl, with_teacher
from glm5.rl.algorithms.table import PRESETS
from glm5.rl.build import PolicyBuilder
from glm5.rl.estimate import estimate
from glm5.rl.loop import run
from glm5.rl.records.store import Records, RecordWriter, read_groups
from glm5.rl.replay import replay
from glm5.rl.rollout import Group
from glm5.rl.rollouts.teachers import Teachers
from glm5.rl.trainer import PolicyTrainer
from glm5.rl.training.objective import RLObjective
from glm5.rl.training.packing import batches_of, pack
from glm5.rl.training.policy import policy_step
from glm5.rl.training.repair import repair
from glm5.rl.training.sequences import sequences_of_step
from glm5.rl.watch import read_metrics
from glm5.testing.numerics import rel_rms
from tests.support.parity import BASE, randomize
from tests.support.rl_batches import groups as random_groups
from tests.support.rl_recipe import small_recipe
from tests.support.sharded import SMALL
from tests.unit.rl.test_loop import weights_of

EXACT = 1e-9  # float64, sums in another order
VOCAB = 61
DISTILL = PRESETS["distill"]


def test_a_teacher_s_advantage_is_the_log_ratio():
    half, quarter, third = math.log(0.5), math.log(0.25), math.log(1 / 3)
    found = with_teacher(
        torch.tensor([7.0, 7.0, 7.0]), torch.tensor([half, torch.nan, third]), torch.tensor([quarter, half, half])
    )
    assert found.tolist() == pytest.approx([math.log(2), 7.0, math.log(2 / 3)])


def test_a_divergence_over_the_likeliest_tokens_by_hand():
    student = torch.tensor([[0.5, 0.25, 0.0], [0.5, 0.3, 0.2], [0.1, 0.2, 0.3]], dtype=torch.float64)
    teacher = torch.tensor([[0.25, 0.25, 0.0], [0.5, 0.3, 0.2], [0.0, 0.0, 0.0]], dtype=torch.float64)
    found = top_k_kl(student.log(), teacher.log())
    want = [0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5), 0.0, 0.0]  # the rest, 1/4 and 1/2; equal; nothing given
    assert found.tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("top_k", [1, 4, 10])
def test_its_gradient_is_that_of_the_formula(top_k):
    """One token for all that are not among the teacher's likeliest, by autograd of the whole distribution."""
    gen = torch.Generator().manual_seed(9)
    logits = torch.randn(6, 11, generator=gen, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, 11, generator=gen, dtype=torch.float64).log_softmax(-1)
    top = teacher.topk(top_k)
    top_k_kl(logits.log_softmax(-1).gather(1, top.indices), top.values).sum().backward()
    found, logits.grad = logits.grad, None
    p, q = logits.softmax(-1), teacher.exp()
    is_rest = torch.ones(6, 11, dtype=torch.bool).scatter(1, top.indices, False)
    lumped = [torch.cat([one.gather(1, top.indices), (one * is_rest).sum(-1, keepdim=True)], -1) for one in (p, q)]
    (lumped[0] * (lumped[0] / lumped[1]).log()).sum().backward()
    assert rel_rms(found, logits.grad) < EXACT


@pytest.fixture(scope="module")
def model() -> Glm5:
    model = Glm5(ModelConfig.from_dict(BASE | SMALL))
    randomize(model, seed=3)
    return model.double()


def taught_groups(top_k: int) -> list[Group]:
    """Two groups over recorded vocabularies, of which a teacher has scored the second."""
    found = random_groups(7, VOCAB, kept=True)
    gen = torch.Generator().manual_seed(8)
    for rollout in found[1].rollouts:
        rollout.teacher = "t"
        for segment in rollout.tree.segments:
            if segment.is_sampled:
                segment.teacher_logprobs = (-3 * torch.rand(len(segment.token_ids), generator=gen)).tolist()
                assert segment.kept is not None
                ids = [kept_ids(mask)[: top_k + number % 2].tolist() for number, mask in enumerate(segment.kept)]
                segment.teacher_top = [[(each, math.log(0.5 / len(row))) for each in row] for row in ids if top_k]
    return found


@pytest.mark.parametrize(("top_k", "mistake"), [(0, None), (3, None), (0, "temperature")])
def test_teachers_rewards_and_supervised_terms_mix_in_a_step(model, top_k, mistake):
    """Against the formula token by token in float64; the control leaves the temperature out."""
    sequences = sequences_of_step(repair(taught_groups(top_k))[0], DISTILL)
    temperature, ce = (1.0 if mistake else 0.8), 0.4
    given = []
    for batch in batches_of(sequences, pack(sequences, 40), 0):
        weight_T = (batch.ids_T % 3 == 1).double()
        with torch.no_grad():
            logits_TW = model.head(model(batch.ids_T, PackedView(batch.lengths)))
        rollout_T = distributions(logits_TW, batch, 0.8)[range(len(batch.ids_T)), batch.ids_T]
        columns = {**batch.columns, "rollout": rollout_T * (batch.columns["policy"] > 0)}
        given.append(replace(batch, weight_T=weight_T, columns=columns))
    step = policy_step(model, RLObjective(DISTILL), OptimizerConfig(kind="adamw", max_grad_norm=None))
    step.objective.coefficients = replace(step.objective.coefficients, ce=ce)
    grads = {}

    def keep() -> dict:
        grads.update({name: one.grad.clone() for name, one in step.optimizers.named.items() if one.grad is not None})
        return {}

    step.optimizers.clip, step.optimizers.step = keep, lambda lr: None
    step.run(given, 0.0)
    model.zero_grad()
    sum_u = sum(one.columns["policy"].sum() for one in given)
    sum_ce = sum(one.weight_of_targets(1) for one in given)
    loss = torch.zeros((), dtype=torch.float64)
    for batch in given:
        logits_TW = model.head(model(batch.ids_T, PackedView(batch.lengths)))
        logp_TW = distributions(logits_TW, batch, temperature)
        of, first = batch.columns, set(np.cumsum([0, *batch.lengths]).tolist())
        for t in range(len(batch.ids_T)):
            if t in first:
                continue
            logp = logp_TW[t, batch.ids_T[t]]
            u, teacher = of["policy"][t], of["teacher"][t]
            if weight := batch.weight_T[t]:
                loss = loss - ce * weight * logits_TW[t - 1].log_softmax(-1)[batch.ids_T[t]] / sum_ce
            if not u:
                continue
            if teacher.isnan():
                loss = loss - u * of["advantage"][t] * logp / sum_u
            elif not top_k:
                loss = loss - u * (teacher - logp.detach()) * logp / sum_u
            else:
                ids, q = of["teacher_ids"][t].long(), of["teacher_top"][t].exp()
                p = logp_TW[t, ids[q > 0]].exp()
                q = q[q > 0]
                rest = (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()
                loss = loss + u * ((p * (p / q).log()).sum() + rest) / sum_u
    loss.backward()
    wanted = {name: one.grad for name, one in model.named_parameters() if name in grads and one.grad is not None}
    error = max(rel_rms(grads[name], one) for name, one in wanted.items() if one.abs().max() > 1e-12)
    assert (error < EXACT) == (mistake is None), error
    assert mistake is None or error > 1e-2


def distributions(logits_TW: torch.Tensor, batch, temperature: float) -> torch.Tensor:
    """For each token, the distribution that it was sampled from, by the place before it: [T, W]."""
    dropped_TW = batch.kept.dropped(VOCAB)
    return (logits_TW.roll(1, 0) / temperature).masked_fill(dropped_TW, -torch.inf).log_softmax(-1)


class Engine:
    """Says of each token -id / `scale`; writes down what is asked of it. `fails`: what it raises in scoring."""

    def __init__(self, name: str, scale: float, log: list, fails: Exception | None = None) -> None:
        self.name, self.scale, self.log, self.fails, self.is_awake = name, scale, log, fails, False

    def start(self) -> None:
        self.log.append(f"{self.name} starts")
        self.is_awake = True

    def close(self) -> None:
        self.log.append(f"{self.name} ends")

    async def wake_up(self, tags=None) -> None:
        self.log.append(f"{self.name} wakes {'all' if tags is None else tags[0]}")
        self.is_awake = tags is None

    async def sleep(self, level: int) -> int:
        self.log.append(f"{self.name} sleeps {level}")
        self.is_awake = False
        return 0

    def generate(self, ids, params, **options):
        assert self.is_awake
        assert params.max_tokens == 1
        self.log.append((self.name, params.temperature, options.get("prompt_masks")))
        entries = [
            {one: SimpleNamespace(tempered=-one / self.scale, rank=1), 3: SimpleNamespace(tempered=-9.0, rank=2)}
            for one in ids[1:]
        ]
        engine = self

        class Deltas:
            async def __aenter__(self):
                if engine.fails is not None:
                    raise engine.fails
                return self

            async def __aexit__(self, *error):
                pass

            async def __aiter__(self):
                yield SimpleNamespace(prompt_logprobs=entries)

        return Deltas()


def sections(level: int = 1) -> dict[str, TeacherSection]:
    return {
        of: TeacherSection(name=name, checkpoint="x", environments=(of,), sleep_level=level)
        for name, of in (("first", "a"), ("second", "b"))
    }


def groups_of(*environments: str) -> list[Group]:
    found = random_groups(5, VOCAB, kept=True)
    for group, name in zip(found, environments, strict=True):
        group.task = replace(group.task, environment=name)
        for one in group.rollouts:
            one.task = group.task
    return found


def test_teachers_take_turns_and_each_scores_its_own_tasks():
    log, groups = [], groups_of("b", "a")
    teachers = Teachers(sections(2), lambda one: Engine(one.name, 10.0 if one.name == "first" else 20.0, log), 1)
    for _ in range(2):
        asyncio.run(teachers.score(groups))
    said = [one for one in log if isinstance(one, str)]
    first = ["first starts", "first wakes all", "second starts", "first sleeps 2", "second wakes weights"]
    assert said[:5] == first
    assert said[5:7] == ["second wakes all", "second sleeps 2"]
    assert said[7:] == [
        "first wakes weights",
        "first wakes all",
        "second wakes weights",
        "first sleeps 2",
        "second wakes weights",
        "second wakes all",
        "second sleeps 2",
    ]
    assert {temperature for name, temperature, _ in (one for one in log if not isinstance(one, str))} == {0.8}
    for group, scale in zip(groups, (20.0, 10.0), strict=True):  # swapped teachers would have the other scale
        for rollout in group.rollouts:
            assert rollout.teacher == ("second" if scale == 20.0 else "first")
            for segment in rollout.tree.segments:
                wanted = [-one / scale for one in segment.token_ids] if segment.is_sampled else []
                assert segment.teacher_logprobs == pytest.approx(wanted)
                assert segment.teacher_top == [[(one, -one / scale)] for one in segment.token_ids if wanted]
    segments = [one for one in groups[0].rollouts[1].tree.segments if one.is_sampled]
    masks = [mask for one in segments for mask in one.kept or ()]
    asked = [one[2] for one in log if not isinstance(one, str)]
    assert any([mask for mask in given or () if mask] == masks for given in asked)


def test_an_environment_without_a_teacher_and_failed_rollouts_are_left_alone():
    log, groups = [], groups_of("c", "a")
    groups[1].rollouts[0].failure = "sandbox"
    asyncio.run(Teachers(sections(), lambda one: Engine(one.name, 1.0, log)).score(groups))
    assert {one[0] for one in log if not isinstance(one, str)} == {"first"}
    scored = [[one.teacher for one in group.rollouts] for group in groups]
    assert scored == [[""] * 4, ["", "first", "first", "first"]]


def test_a_branch_is_scored_once():
    groups, log = groups_of("a", "c"), []
    tree = groups[0].rollouts[0].tree
    tree.add(replace(tree.segments[1], parent=0))  # an answer tried again
    asyncio.run(Teachers(sections(), lambda one: Engine(one.name, 1.0, log)).score(groups))
    assert [bool(one.teacher_logprobs) for one in tree.segments] == [False, True, True]
    assert len([one for one in log if not isinstance(one, str)]) == 5


def test_engines_that_end_are_started_again_with_the_next_call():
    log, fails = [], [EngineDead("killed"), None]
    teachers = Teachers(sections(), lambda one: Engine(one.name, 1.0, log, fails.pop(0) if fails else None))
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(teachers.score(groups_of("a", "c")))
    assert caught.group_contains(EngineDead)
    assert log[-1] == "first ends"
    asyncio.run(teachers.score(groups_of("a", "c")))
    assert log.count("first starts") == 2


def test_a_teacher_that_says_no_number_is_told_of():
    teachers = Teachers(sections(), lambda one: Engine(one.name, -math.inf / math.inf, []))
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(teachers.score(groups_of("a", "c")))
    assert caught.group_contains(TrainingError, match="teacher first: a log-probability is not finite")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    """A student with its tokenizer, and another model with the same one."""
    folder = tmp_path_factory.mktemp("checkpoints")
    recipe, found = small_recipe(folder, 'environment=[{name="guess"},{name="sort"}]'), list[Path]()
    builder = PolicyBuilder(recipe, folder)
    for seed in (0, 1):
        found.append(folder / str(seed))
        builder.recipe = recipe.model_copy(update={"seed": seed})
        save(PolicyTrainer(builder.recipe, builder, torch.device("cpu")).model, found[-1], assets=builder.assets)
    return found


def settings(checkpoints: list[Path], *more: str) -> tuple[str, ...]:
    student, other = checkpoints
    return (
        f'model={{checkpoint="{student}"}}',
        'algorithm={name="distill"}',
        'environment=[{name="guess",tasks=15},{name="sort"}]',
        (
            f'teacher=[{{name="own",checkpoint="{student}",environments=["guess"]}},'
            f'{{name="other",checkpoint="{other}",environments=["sort"]}}]'
        ),
        *more,
    )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("teacher=[]", r'\[\[teacher\]\] and algorithm.name = "distill" belong together'),
        ('algorithm={name="grpo"}', r'\[\[teacher\]\] and algorithm.name = "distill" belong together'),
        ('algorithm={name="grpo",teacher_top_k=2}', "teacher_top_k: grpo has no teachers"),
        ('teacher.0.environments=["gues"]', "no environment is called gues; allowed: guess, sort"),
        ('teacher.0.environments=["guess", "sort"]', "environment sort has more than one teacher; allowed: one"),
        ("teacher.0.name=other", "two teachers are called other"),
        ('model={preset="nano"}', r"the student is a checkpoint, .* set model\.checkpoint"),
        ("teacher.0.sleep_level=3", r"sleep_level: got 3; allowed: "),
    ],
)
def test_a_recipe_whose_teachers_make_no_sense_is_refused(tmp_path, checkpoints, setting, said):
    with pytest.raises(ConfigError, match=said):
        small_recipe(tmp_path, *settings(checkpoints, setting))


def test_groups_of_one_need_teachers_for_all(tmp_path, checkpoints):
    given = settings(checkpoints, 'teacher.0.environments=["sort"]', "rollouts.group_size=1")
    with pytest.raises(ConfigError, match=r"environment guess has no teacher, and in groups of one .*group_size"):
        small_recipe(
            tmp_path,
            *given[:-2],
            f'teacher=[{{name="a",checkpoint="{checkpoints[1]}",environments=["sort"]}}]',
            given[-1],
        )


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path, checkpoints):
    """In a dry run and at the beginning of a run; the same vocabulary in another folder is taken."""
    own, _ = checkpoints
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((own / "config.json").read_text())
    train_bpe(["other words than those"], 300).save(other)
    recipe = small_recipe(tmp_path, *settings([own, other]))
    for refuse in (estimate, lambda one: PolicyBuilder(one, tmp_path / "out")):
        with pytest.raises(ConfigError, match=r"teacher other: .*other has another tokenizer .*: token \d+ is .* here"):
            refuse(recipe)
    said = estimate(small_recipe(tmp_path, *settings(checkpoints)))
    assert "teacher own: weights 0.000" in said


def test_what_teachers_say_is_kept_in_records(tmp_path):
    groups = taught_groups(2)
    empty = [[[None] * len(one.tree.segments) for one in group.rollouts] for group in groups]
    RecordWriter(tmp_path, 2**30, 1).write(1, 1, {}, groups, empty)
    for group, found in zip(groups, read_groups(Records(tmp_path), 1), strict=True):
        assert [one.teacher for one in found.rollouts] == [one.teacher for one in group.rollouts]
        for one, again in zip(group.rollouts, found.rollouts, strict=True):
            assert [vars(segment) for segment in again.tree.segments] == [
                vars(segment) for segment in one.tree.segments
            ]


@pytest.mark.slow
@pytest.mark.parametrize("top_k", ["0", pytest.param("4", marks=pytest.mark.long)])
def test_a_run_with_two_teachers(tmp_path, checkpoints, top_k):
    """The student's own probabilities are an engine's to the bit: as its own teacher it has nothing to learn in the
    first step. A run that was stopped ends with the same bits, and its steps can be repeated from their records."""
    more = (
        "rollouts.min_p=0.02",
        "rollouts.temperature=0.8",
        "algorithm.entropy=0",
        "records.state_every=1",
        f"algorithm.teacher_top_k={top_k}",
        "evaluation.tasks=1",
        "rollouts.group_size=1",
        "rollouts.groups=16",
    )
    for folder, stops in (("whole", (3,)), ("parts", (2, 3))):
        (tmp_path / folder).mkdir()
        for steps in stops:
            recipe = small_recipe(tmp_path / folder, *settings(checkpoints, *more, f"steps={steps}"))
            run(recipe.model_copy(update={"warm_start": None}))
    lines = [line for line in read_metrics(tmp_path / "whole/run") if "reward/mean" in line]
    if top_k == "0":
        assert lines[0]["teacher_kl/own/guess"] == 0.0
    assert abs(lines[0]["teacher_kl/own/guess"]) < 1e-6 < 1e-4 < lines[0]["teacher_kl/other/sort"]
    assert lines[0]["kl/mismatch"] == 0.0 < lines[0]["time/teachers"]
    assert weights_of(tmp_path / "parts/run") == weights_of(tmp_path / "whole/run")
    assert [one.tensors for one in replay(tmp_path / "whole/run", 3)] == [[]]
