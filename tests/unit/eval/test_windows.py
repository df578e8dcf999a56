"""Tasks through sliding windows: a window over everything says what greedy decoding says, as far as it is right."""

import pytest
import torch

from glm5.checkpoint.init import write_random
from glm5.checkpoint.load import load
from glm5.cli.main import main
from glm5.config.presets import preset
from glm5.config.step import WindowConfig
from glm5.eval.ruler import Question, make
from glm5.eval.sliding_window import by_windows, find_pattern
from glm5.model.packed import PackedView
from tests.support.tokenizers import tiny_tokenizer

LENGTH = 500


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("windows") / "tiny"
    write_random(preset("tiny"), path, seed=1, dtype="float32")
    tiny_tokenizer().save(path)
    return path


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint)


@torch.no_grad()
def greedy(model, ids: list[int], num: int) -> list[int]:
    """Dense attention, every token anew."""
    for _ in range(num):
        hidden_TD = model(torch.tensor(ids), PackedView([len(ids)], stage="dense"))
        ids = [*ids, int(model.head(hidden_TD[-1:]).argmax())]
    return ids[-num:]


def test_a_window_over_everything_says_what_greedy_decoding_does(model):
    """Where the answer asked for is the one that the model gives, both agree token by token."""
    tokenizer = tiny_tokenizer()
    samples = make(tokenizer, "niah_single_1", LENGTH, range(3))
    answers = [greedy(model, each.prompt_ids, 6) for each in samples]
    items = [Question(each.sample, each.prompt_ids, ids) for each, ids in zip(samples, answers, strict=True)]
    said = by_windows(model, tokenizer, WindowConfig(size=2 * LENGTH, pattern="S"))(items)
    assert said == [tokenizer.decode(ids, skip_special=True) for ids in answers]
    near = by_windows(model, tokenizer, WindowConfig(size=4, pattern="S"))(items)
    assert near != said


def test_the_pattern_has_windows_in_half_of_the_layers(model):
    pattern = find_pattern(model, tiny_tokenizer(), 16, ("niah_single_1",), LENGTH)
    assert sorted(pattern) == ["F", "F", "S", "S"]
    assert pattern == find_pattern(model, tiny_tokenizer(), 16, ("niah_single_1",), LENGTH)


def test_the_command(checkpoint, capsys):
    argv = ["eval", "ruler", str(checkpoint), "--lengths", "500", "--tasks", "niah_single_1", "--num-samples", "2"]
    assert main([*argv, "--device", "cpu", "--attention", "window", "--window", "32", "--pattern", "SSF"]) == 0
    assert "pattern        SSF\n" in (shown := capsys.readouterr().out)
    assert "niah_single_1  " in shown
    assert main([*argv, "--attention", "window", "--pattern", "SX"]) == 2
    assert "--pattern: got 'SX'" in capsys.readouterr().err
