"""The generative judge: what it asks, what of its answers is read, votes, both orders, and everything that fails."""

import asyncio
import json
from random import Random

import pytest

from glm5.config.rl_reward import JudgeSection
from glm5.rl.rewards.judge import MAX_ANSWER, MAX_SHOWN, PAUSE_S, Judge, JudgeFailed, decided, read_score, read_verdict
from tests.support.judging import judging

URL = "http://127.0.0.1:9/v1"  # nobody listens


def judge(ask=None, clock=lambda: 0.0, **settings) -> Judge:
    return Judge(JudgeSection.model_validate({"url": URL, "retries": 0, **settings}), ask, clock)


def values(of: Judge, answers, prompt="Why?", rubric=""):
    return asyncio.run(of.values(prompt, answers, rubric))


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Good.\nscore: 7", 0.7),
        ('{"score": 10}', 1.0),
        ("Score=2.5, I think", 0.25),
        ("score: 3 ... no, score: 4", 0.4),
    ],
)
def test_scores_are_read(said, score):
    assert read_score(said) == score


@pytest.mark.parametrize("said", ["", "seven", "score: 11", "score: -3", "score: 100", "score: 1e9", "7/10", "score:"])
def test_what_is_no_score_is_nonsense(said):
    with pytest.raises(JudgeFailed) as failed:
        read_score(said)
    assert failed.value.kind == "nonsense"


def test_verdicts_are_read():
    assert [read_verdict(said) for said in ("I say\n**A**.", "b", "(TIE)")] == [1.0, 0.0, 0.5]
    for said in ("", "Both", "A or B, who knows"):
        with pytest.raises(JudgeFailed):
            read_verdict(said)


def test_it_asks_with_the_rubric_and_takes_the_mean_of_votes():
    seen, scores = list[tuple[str, dict, float]](), iter([2, 4, 9])

    async def ask(system, shown, temperature):
        seen.append((system, shown, temperature))
        return f"score: {next(scores)}"

    found = values(judge(ask, votes=3, rubric="Is it short?"), ["x" * 30_000], rubric="Is it true?")
    assert found.values == [pytest.approx(0.5)]
    system, shown, temperature = seen[0]
    assert "Is it true?\nIs it short?" in system
    assert (len(shown["answer"]), temperature, len(seen)) == (MAX_SHOWN, 1.0, 3)


def biased(better: float, first: float, random: Random):
    """A judge that says which answer is longer with probability `better`, and else, with probability `first`, A."""

    async def ask(_system, shown, _temperature):
        if random.random() < better:
            return "A" if len(shown["A"]) > len(shown["B"]) else "B"
        return "A" if random.random() < first else "B"

    return ask


def test_swapping_takes_the_bias_of_position_away():
    """A scripted judge that follows position in 6 of 10 cases, always for the first one."""
    print("seed 5")
    single, swapped, firsts = [], [], []
    ask, answers = biased(0.4, 1.0, Random(5)), ["long answer", "short"]
    of = judge(ask, mode="pairs")

    async def play():
        for _ in range(300):
            said = await ask("", {"A": answers[1], "B": answers[0]}, 0.0)
            single.append(read_verdict(said))  # the worse one stands first
            found = await of.values("Why?", answers)
            swapped.append(found.values[0])
            firsts.append(found.first)

    asyncio.run(play())
    assert sum(single) / 300 == pytest.approx(0.6, abs=0.09)  # 3 standard deviations
    assert sum(swapped) / 300 == pytest.approx(0.7, abs=0.09)  # wins in 0.4 of the swapped pairs, draws in 0.6
    assert min(swapped) == 0.5  # never against the better one
    assert sum(firsts) / 300 == pytest.approx(0.8, abs=0.07)  # control: the bias is there, and is shown


def test_each_answer_is_compared_with_two_others():
    async def ask(_system, shown, _temperature):
        return "A" if shown["A"] > shown["B"] else "B"

    found = values(judge(ask, mode="pairs"), ["c", "a", "b", "d"])
    assert found.values == [0.5, 0.0, 0.5, 1.0]  # c beats a, b beats a, d beats b, d beats c
    assert (found.first, found.agreed) == (0.5, 1.0)
    assert values(judge(ask, mode="pairs"), ["a", "b"]).values == [0.0, 1.0]
    assert values(judge(ask, mode="pairs"), ["a"]).values == [None]
    assert [decided(*votes) for votes in ((1, 0), (0, 1), (1, 1), (0.5, 0))] == [1.0, 0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("status", "said", "silent", "kind"),
    [
        *((500, "score: 5", False, "down"), (200, "fine", False, "nonsense"), (200, None, False, "nonsense")),
        *((200, "score: 5", True, "slow"), (200, "score: 5" + " " * MAX_ANSWER, False, "large")),
    ],
    ids=["error", "nonsense", "null", "slow", "huge"],
)
def test_every_failure_has_a_kind_and_no_value(status, said, silent, kind):
    asked = list[dict]()
    with judging(status, said, asked, is_silent=silent) as url:
        found = values(judge(url=url, retries=1, timeout_s=0.1 if silent else 30), ["an answer"])
    assert (found.values, dict(found.failures)) == ([None], {kind: 1})
    assert silent or len(asked) == 2  # a slow one may not even have got the question


def test_a_judge_that_answers_and_one_that_is_gone():
    asked = list[dict]()
    with judging(200, "Well done. score: 8", asked) as url:
        assert values(judge(url=url, model="strict"), ["yes"]).values == [0.8]
    assert (asked[0]["model"], asked[0]["temperature"]) == ("strict", 0)
    assert json.loads(asked[0]["messages"][1]["content"])["answer"] == "yes"
    for url in ({}, {"url": "http://[::1"}):
        assert values(judge(**url), ["yes"]).failures == {"down": 1}


def test_a_judge_that_is_gone_is_left_alone_for_a_while(caplog):
    now, asked = [0.0], list[str]()

    async def ask(*_):
        asked.append("")
        raise JudgeFailed("down", "gone")

    of = judge(ask, clock=lambda: now[0])
    assert values(of, ["a", "b"]).failures == {"down": 2}
    assert values(of, ["a", "b"]).failures == {"paused": 2}
    assert [one.getMessage() for one in caplog.records] == [
        "reward.judge: no verdict on a whole group (down: gone), asked again in 60 s; other sources go on"
    ]
    now[0] = PAUSE_S
    assert values(of, ["a", "b"]).failures == {"down": 2}
    assert len(asked) == 4
