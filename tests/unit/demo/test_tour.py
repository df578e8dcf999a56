"""Scoring accepts right answers and refuses wrong ones; the tour reuses its model and says when a kind fails."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from glm5.chat.template import ChatTemplate
from glm5.demo import tour
from glm5.demo.scoring import Score, score
from glm5.train.data.dialogues import messages, train_tokenizer
from glm5.train.data.questions import KINDS, conversation

NUM_QUESTIONS = 8


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.bundled("glm-5.2", train_tokenizer(768))


class Oracle:
    """An engine that knows the answers; `spoil` changes the text of each."""

    def __init__(self, template, kind, spoil=lambda text: text):
        self.tokenizer, self.spoil = template.tokenizer, spoil
        self.answers = {}
        for index in range(NUM_QUESTIONS):
            chat = conversation(kind, "held-out", 0, index)
            listed = messages(chat.turns)
            for i, message in enumerate(listed):
                if message["role"] == "assistant":
                    tools, switch = list(chat.tools) or None, {"enable_thinking": chat.thinking}
                    prompt = template.render(listed[:i], tools, **switch)
                    whole = template.render(listed[: i + 1], tools, add_generation_prompt=False, **switch)
                    self.answers[tuple(template.encode(listed[:i], tools, **switch))] = whole.removeprefix(prompt)

    def generate(self, prompts, params, use_tqdm):
        texts = [self.spoil(self.answers[tuple(prompt)]) for prompt in prompts]
        outputs = [SimpleNamespace(token_ids=self.tokenizer.encode(text)) for text in texts]
        return [SimpleNamespace(outputs=[output]) for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_score(template, kind):
    assert score(Oracle(template, kind), template, kind, NUM_QUESTIONS).accuracy == 1.0


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        *((kind, lambda text: text + "!") for kind in KINDS),
        ("think", lambda text: text[text.index("</think>") :]),
        ("tool", lambda text: text.replace("<arg_value>", "<arg_value>x")),
        ("tool", lambda text: text.replace("lookup", "order") if "lookup" in text else text.replace("order", "lookup")),
        ("tool", lambda text: text.replace("</tool_call>", "")),
    ],
)
def test_wrong_answers_do_not(template, kind, spoil):
    assert score(Oracle(template, kind, spoil), template, kind, NUM_QUESTIONS).accuracy == 0.0


@pytest.fixture
def short_tour(tmp_path, monkeypatch):
    """The tour with everything that takes time replaced; gives (folder, scores and drafts to hand out, calls)."""
    scores = {kind: Score(200, 200, 1000, 1.0) for kind in KINDS}
    calls = []

    def train(out):
        calls.append("train")
        (out / "model").mkdir(parents=True)
        (out / "model" / "config.json").write_text("{}")

    drafts = {"drafted": [1000, 1000, 1000], "accepted": [900, 500, 200]}
    llm = SimpleNamespace(tokenizer=1, cfg=SimpleNamespace(indexer_types=()), stats=lambda: {"speculation": drafts})
    monkeypatch.setattr(tour, "train", train)
    monkeypatch.setattr(tour, "LLM", lambda *args, **kwargs: nullcontext(llm))
    monkeypatch.setattr(tour.ChatTemplate, "for_checkpoint", lambda *args: None)
    monkeypatch.setattr(tour, "score_all", lambda *args: scores)
    monkeypatch.setattr(tour, "server", lambda *args: tmp_path.joinpath("nothing").open("w"))
    monkeypatch.setattr(tour, "show", lambda _url, _say, *kinds: calls.append(("show", *kinds) if kinds else "show"))
    return tmp_path / "out", scores, drafts, calls


def test_a_second_run_reuses_the_model(short_tour, capsys):
    out, _, _, calls = short_tour
    assert tour.run_demo(out) == 0
    assert tour.run_demo(out) == 0
    assert calls == ["train", "show", "show"]
    said = capsys.readouterr().out
    assert "using the model of an earlier run" in said
    assert f"glm5 chat {out}/model" in said
    assert "2.60 tokens a step for each request, with 3 drafted\n" in said


def test_a_kept_model_answers_before_anything_is_trained(short_tour, capsys):
    out, _, _, calls = short_tour
    assert tour.run_demo(out, kept=out / "kept") == 0
    assert calls == [("show", tour.KEPT_KINDS, 1), "train", "show"]
    said = capsys.readouterr().out
    assert said.startswith("from nothing to a GLM-5 that answers")
    assert re.search(r"\nanswered after \d+ s\n", said)


def test_a_kind_below_the_bar_fails_the_demo(short_tour, capsys):
    out, scores, _, _ = short_tour
    scores["recall"] = Score(179, 200, 1000, 1.0)
    assert tour.run_demo(out) == 1
    assert "recall      89.5% of 200   below 90%: the demo has failed" in capsys.readouterr().out


def test_drafts_that_do_not_stand_fail_the_demo(short_tour, capsys):
    out, _, drafts, _ = short_tour
    drafts["accepted"] = [500, 200, 100]
    assert tour.run_demo(out) == 1
    assert "1.80 tokens a step for each request, with 3 drafted   not above 1.8: the demo" in capsys.readouterr().out
