"""A recorded step is trained again to the same bits, and a record that was changed is noticed."""

import gzip
import json
from random import Random

import numpy as np
import pytest
import torch

from glm5.common.errors import DataError, TrainingError
from glm5.config.rl import RLRecipe
from glm5.rl.build import PolicyBuilder
from glm5.rl.figures import figures_of
from glm5.rl.records.digest import digests
from glm5.rl.records.store import Records, RecordWriter
from glm5.rl.replay import replay
from glm5.rl.rollout import Group
from glm5.rl.state import RunState
from glm5.rl.trainer import PolicyTrainer, arithmetic
from tests.support.rl_run import random_rollout, task_of, tokenizer

SEED = 3
STEPS, STATE_EVERY = 4, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of STEPS steps on random rollouts, and the step's groups and results."""
    out = tmp_path_factory.mktemp("run")
    tokenizer().save(out / "tokens")
    config = {"hidden_size": 32, "vocab_size": 320, "intermediate_size": 32, "num_nextn_predict_layers": 0}
    recipe = RLRecipe.model_validate(
        {
            "name": "replayed",
            "out": str(out),
            "device": "cpu",
            "steps": STEPS,
            "lr": 1e-2,
            "final_lr": 1e-3,
            "threads": 1,
            "model": {"preset": "nano", "tokenizer": str(out / "tokens"), "config": config},
            "algorithm": {"name": "grpo", "entropy": 0.1, "final_entropy": 0.0, "reference_kl": 0.1},
            "environment": [{"name": "guess"}],
        }
    )
    (out / "recipe.json").write_text(recipe.model_dump_json())
    state, writer, random = RunState(out, recipe), RecordWriter(out, 2**30, 1), Random(SEED)
    print("seed", SEED)
    done = []
    before = torch.get_num_threads()
    with arithmetic(recipe, torch.device("cpu")):
        trainer = PolicyTrainer(recipe, PolicyBuilder(recipe, out), torch.device("cpu"))
        trainer.begin()
        for step in range(1, STEPS + 1):
            if (step - 1) % STATE_EVERY == 0:
                state.write(step - 1, {}, trainer.state())
                writer.keep_state(state.file, step - 1)
            groups = [
                Group(
                    number,
                    task_of(number),
                    [random_rollout(random, task_of(number), with_records=False) for _ in "abc"],
                )
                for number in range(2)
            ]
            trained = trainer.train(groups, step - 1)
            columns = trained.scores.by_segment(groups)
            writer.write(step, STEPS, digests(trainer.learnt()), groups, columns)
            done.append((groups, trained, columns))
    yield out, done
    torch.set_num_threads(before)


def test_steps_are_the_same_to_the_bit(run):
    out, _ = run
    assert [str(one) for one in replay(out, 2)] == [f"step {step}: equal, all 57 tensors to the bit" for step in (1, 2)]
    assert [(one.step, one.tensors) for one in replay(out, 4)] == [(3, []), (4, [])]


def test_a_changed_record_is_noticed(run):
    out, _ = run
    path = Records(out).path(3)
    whole = path.read_bytes()
    try:
        trace = json.loads(gzip.decompress(whole).splitlines()[1])
        number, node = next((i, one) for i, one in enumerate(trace["nodes"]) if one.get("sampled"))
        _rewrite(path, Records(out), node["token_ids"][0] + 1, number)
        (found,) = replay(out, 3)
    finally:
        path.write_bytes(whole)
    assert len(found.tensors) > 10
    assert f"3-0-0, segment {number}, token 0" in str(found)


def _rewrite(path, records, token_id, number):
    """The same records but for one token of the first rollout."""
    from glm5.rl.records import store

    head, members = records.head(3), []
    for index, traces in enumerate(records.groups(3)):
        if index == 0:
            traces[0].nodes[number].token_ids[0] = token_id
        members.append(store._compress([store.as_json(one) for one in traces]))
        head.groups[index].size = len(members[-1])
    path.write_bytes(b"".join([store._compress([store.as_json(head)]), *members]))


def test_what_is_missing_is_said(run, tmp_path):
    out, _ = run
    with pytest.raises(DataError, match="kept are steps 1 to 4"):
        list(replay(out, 9))
    with pytest.raises(DataError, match=r"recipe\.json"):
        list(replay(tmp_path, 1))
    (tmp_path / "recipe.json").write_text("[" * 10**5)
    with pytest.raises(DataError, match=r"recipe\.json"):
        list(replay(tmp_path, 1))
    records = Records(out)
    path, moved = records.path(3), out / "elsewhere"
    path.rename(moved)
    with pytest.raises(TrainingError, match="the records of 3 are missing"):
        list(replay(out, 4))
    moved.rename(path)
    for number, kept in records.states().items():
        kept.rename(out / f"{number}")
    with pytest.raises(TrainingError, match="no state from before step 1"):
        list(replay(out, 1))
    for number in (0, 2):
        (out / f"{number}").rename(records.folder / f"state-{number:08d}.pt")


def test_every_trained_token_has_its_figures(run):
    _, done = run
    for groups, trained, columns in done:
        scores = trained.scores
        num_sampled = sum(one.tree.num_sampled for group in groups for one in group.rollouts)
        assert len(scores.of_trained("logprobs")) == num_sampled
        for group, of_group in zip(groups, columns, strict=True):
            for rollout, of_rollout in zip(group.rollouts, of_group, strict=True):
                for segment, of in zip(rollout.tree.segments, of_rollout, strict=True):
                    assert (of is not None) == segment.is_sampled
                    if of is not None:
                        assert {len(values) for values in of.values()} == {len(segment.token_ids)}
                        masked, weights = np.array(of["masked"]) > 0, np.array(of["weights"])
                        assert not weights[masked].any()
                        assert np.isfinite(of["trainer_logprobs"]).all()
                        assert max(of["trainer_logprobs"]) <= 0
        # The rollout's log-probabilities, which travelled the same way, came back to their places.
        of_rollouts = [
            one
            for group in groups
            for rollout in group.rollouts
            for segment in rollout.tree.segments
            for one in segment.logprobs
        ]
        assert sorted(scores.of_trained("logprobs")) == sorted(of_rollouts)


def test_figures_of_a_step(run):
    _, done = run
    groups, trained, _ = done[0]
    times = {"rollout": 2.0, "train": 1.0}
    found = figures_of(0, groups, trained, times)
    ratio = np.exp(trained.scores.of_trained("trainer_logprobs") - trained.scores.of_trained("logprobs"))
    masked = trained.scores.of_trained("masked") > 0
    assert found["is/ratio_min"] == ratio.min()
    assert found["is/ratio_max"] == ratio.max()
    assert found["is/ess"] == pytest.approx(ratio.sum() ** 2 / (ratio**2).sum() / len(ratio), rel=1e-12)
    assert 0 < found["is/mask_frac_low"] < found["is/mask_frac_low"] + found["is/mask_frac_high"]
    assert found["is/mask_frac_low"] + found["is/mask_frac_high"] == pytest.approx(masked.mean(), rel=1e-12)
    assert found["is/mask_frac"] == pytest.approx(masked.mean(), rel=1e-6), "as the objective counts them"
    assert found["is/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-6)
    versions = [
        version
        for group in groups
        for rollout in group.rollouts
        for segment in rollout.tree.segments
        for version in segment.versions
    ]
    assert found["staleness/mean"] == pytest.approx(-np.mean(versions), rel=1e-12), "the weights of step 1 are 0"
    assert found["staleness/max"] == -min(versions)
    assert found["metric/guesses"] == 2.0
    assert found["time/step"] == 3.0
    assert {"kl/mismatch", "logp/abs_diff", "adv/std", "grad/norm", "loss/policy", "entropy"} <= found.keys()
    assert all(isinstance(value, float) for value in found.values()), found
