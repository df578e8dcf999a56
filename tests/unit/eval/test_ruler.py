"""RULER-like evaluation: right answers score, wrong ones do not, and the table says for what."""

import json

import pytest

from glm5.checkpoint.init import write_random
from glm5.cli.main import main
from glm5.common.errors import DataError
from glm5.config.presets import preset
from glm5.eval.dense import selecting
from glm5.eval.ruler import document, evaluate, make, table, tasks_of
from tests.support.tokenizers import tiny_tokenizer

TASKS = ("niah_single_1", "niah_multiquery", "vt")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("ruler") / "tiny"
    write_random(preset("tiny"), path, seed=1)
    tiny_tokenizer().save(path)
    return path


def scores_of(answer, tasks=TASKS, lengths=(700, 900)):
    return list(evaluate(answer, tiny_tokenizer(), tasks, lengths, num_samples=3))


def test_right_answers_score():
    assert {score.accuracy for score in scores_of(lambda items: [each.sample.answer for each in items])} == {1.0}
    assert {score.accuracy for score in scores_of(lambda items: ["no" for _ in items])} == {0.0}


def test_parts_of_answers_score_in_part_and_with_an_error():
    (some,) = scores_of(lambda items: [each.sample.answers[0] for each in items], ("niah_multiquery",), (900,))
    assert (some.accuracy, some.error) == (0.25, 0.0)
    (one,) = scores_of(lambda items: [items[0].sample.answer, "", ""], ("niah_multiquery",), (900,))
    assert one.accuracy == pytest.approx(1 / 3)
    assert one.error == pytest.approx(1 / 3)


def test_samples_fill_their_length_and_end():
    tokenizer = tiny_tokenizer()
    for each in make(tokenizer, "niah_single_2", 800, range(3)):
        assert 700 < len(each.prompt_ids) + len(each.answer_ids) <= 800
        assert tokenizer.decode(each.answer_ids, skip_special=True) == each.sample.answer
        assert each.answer_ids[-1] == tokenizer.id_of("<|endoftext|>")


def test_a_task_that_does_not_fit_is_left_out(caplog):
    found = scores_of(lambda items: [each.sample.answer for each in items], ("vt", "niah_multiquery"), (500, 900))
    assert "left out: task niah_multiquery needs at least" in caplog.text
    assert table(found).splitlines() == [
        "task               500    900",
        "vt               100.0  100.0",
        "niah_multiquery      -  100.0",
        "mean             100.0  100.0",
    ]
    assert document(found, {"tool": "x"})["mean"] == {"500": 1.0, "900": 1.0}


def test_an_unknown_task_is_refused():
    with pytest.raises(DataError, match="tasks: got 'niah'; allowed: niah_single_1"):
        tasks_of(["niah"])
    assert len(tasks_of([])) == 13


def test_dense_is_the_same_checkpoint_with_another_selection(checkpoint):
    with selecting(checkpoint, 777) as folder:
        assert json.loads((folder / "config.json").read_text())["index_topk"] == 777
        assert {file.name for file in folder.iterdir()} == {file.name for file in checkpoint.iterdir()}
    assert not folder.exists()
    assert json.loads((checkpoint / "config.json").read_text())["index_topk"] != 777


def test_the_command(checkpoint, tmp_path, capsys):
    file = tmp_path / "r.json"
    argv = ["eval", "ruler", str(checkpoint), "--lengths", "0.5k", "--tasks", "niah_single_1", "--num-samples", "2"]
    assert main([*argv, "--device", "cpu", "--attention", "dense", "--json", str(file)]) == 0
    shown, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "task           500\nniah_single_1  " in shown
    assert found["settings"]["attention"] == "dense"
    assert [score["length"] for score in found["scores"]] == [500]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("eval ruler m --lengths 10", "--lengths: got '10'; allowed: at least 64"),
        ("eval ruler m --lengths 4K --max-model-len 2K", "--lengths: got 4096; allowed: up to --max-model-len 2048"),
        ("eval ruler m --json no/where/x", "--json: there is no folder no/where"),
        ("eval rule m", "no command 'eval rule'; did you mean eval ruler?"),
    ],
)
def test_what_cannot_be_asked(argv, message, capsys):
    assert main(argv.split()) == 2
    assert capsys.readouterr().err == f"glm5: error: {message}\n"
