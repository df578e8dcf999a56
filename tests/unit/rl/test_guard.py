"""The guard on tool calls: what its rules match, what a judge changes, and that the rollout goes on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from pydantic import ValidationError

from glm5.chat.template import ChatTemplate
from glm5.common.errors import ConfigError
from glm5.config.rl import Rollouts
from glm5.config.rl_guard import RULES, GuardSection, matcher
from glm5.rl.environments.boxes import NO_BOXES
from glm5.rl.environments.protocol import Environment, Reply, Task, Turn
from glm5.rl.environments.tool_use import LazyBox, ToolEpisode, call, function_tool
from glm5.rl.loop import run
from glm5.rl.records.store import Records, read_groups
from glm5.rl.rollout import Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.guard import DUMMY, PROMPT
from glm5.rl.watch import read_lines
from tests.support.judging import judging
from tests.support.long_conversations import ScriptedPolicy, play, said
from tests.support.rl_recipe import small_recipe
from tests.support.tokenizers import tiny_tokenizer

CHEATS = {
    "hidden": ["cat /tests/test_outputs.py", "ls -la '/solution'", "bash ../oracle/solve.sh", "x = open('/tests/a')"],
    "reward": ["echo 1 > /logs/verifier/x", "printf 1 >reward.txt"],
    "runner": ["echo 'def pytest_runtest(): 0' >> conftest.py", "PYTEST_ADDOPTS=-x python a.py", "vi unittest/case.py"],
    "history": ["git log -p --all", "git -C /app fetch upstream", "git show FETCH_HEAD", "cd a; git diff origin/main"],
    "upstream": [
        *("pip download toolz==1.0", "pip3 install --force-reinstall toolz"),
        *("curl -L https://github.com/a/b/raw/x", "python -c \"urlopen('https://pypi.org/x')\""),
    ],
}
HONEST = [
    *("cat src/tests/test_a.py", "ls tests", "python -m pytest -q", "git log --oneline -5", "git diff", "git status"),
    *("pip install -e .", "curl http://localhost:8000/health", "grep -rn reward src", "sed -n 1,5p src/solution.py"),
]


def found(text: str) -> set[str]:
    return {name for name, pattern in RULES.items() if matcher(pattern)(text)}


def test_rules_match_cheats_and_leave_honest_work_alone():
    for name, cheats in CHEATS.items():
        assert all(name in found(cheat) for cheat in cheats), name
    assert set(CHEATS) == set(RULES)
    assert {text: found(text) for text in HONEST if found(text)} == {}


def test_no_rule_takes_forever():
    """Python's `re` would not end within a lifetime."""
    for rule in (r"^(a+)+$", r"^(a|a)*$", r"(.*)*x!", r"^(\w+\s?)*$", r"^(a?){30}a{30}$"):
        assert not matcher(rule)("a" * 100_000 + "!"), rule
    assert matcher(r"(a+)+$")("a" * 100_000)
    assert matcher("hidden")("\ud800 hidden")  # half of a character hides nothing


TASK = Task("shell", 0, 0, ({"role": "user", "content": "Go."},), {}, (function_tool("bash", "", command="a line"),))
SECRET, SAFE = "cat /tests/secret", "ls"
CHAT = TokenChat(ChatTemplate.bundled("glm-5.2", tiny_tokenizer()))


def played(guard: dict | None) -> tuple[Rollout, list[str], str]:
    """A policy that runs two commands in one reply, one that cheats, and one alone: its rollout, the commands that ran,
    and the last prompt."""
    ran = list[str]()

    def bash(given) -> str:
        ran.append(given["command"])
        return f"result of {given['command']}"

    def reset(task: Task) -> ToolEpisode:
        end = Turn(is_done=True, rewards={"right": 1.0})
        return ToolEpisode(task, {"bash": bash}, lambda _: end, 9, LazyBox(NO_BOXES))

    both = Reply("", tool_calls=[call("bash", command=SECRET), call("bash", command=SAFE)])
    script = [said(both), said(Reply("", tool_calls=[call("bash", command=SECRET)])), said(Reply("done"))]
    settings = {"max_tokens": 200, "max_model_len": 4096, "guard": guard}
    policy = ScriptedPolicy(Rollouts.model_validate(settings), CHAT, script)
    rollout = play(policy, CHAT, TASK, reset)
    return rollout, ran, CHAT.tokenizer.decode(policy.seen[-1][0])


def test_a_blocked_call_is_answered_and_the_rollout_goes_on():
    rollout, ran, prompt = played({})
    assert (ran, rollout.reward, rollout.num_turns) == ([SAFE], 1.0, 3)
    assert (rollout.metrics["hack_flagged"], rollout.metrics["hack_blocked"]) == (2, 2)
    told = [one["content"] for one in rollout.messages if one["role"] == "tool"]
    assert told == [DUMMY, f"result of {SAFE}", DUMMY]
    assert prompt.count(DUMMY) == 2
    assert json.loads(rollout.messages[1]["tool_calls"][0]["function"]["arguments"]) == {"command": SECRET}


def test_control_without_a_guard_and_without_the_rule_the_call_runs():
    rollout, ran, _ = played(None)
    assert (ran, "hack_blocked" in rollout.metrics) == ([SECRET, SAFE, SECRET], False)
    rollout, ran, _ = played({"rules": {"hidden": ""}})
    assert (ran, rollout.metrics["hack_flagged"]) == ([SECRET, SAFE, SECRET], 0)


class Shell(Environment):
    """Two commands, which a run's guard sees first; its metrics tell what ran."""

    name, num_turns = "shell", 2

    def task(self, seed: int, level: int) -> Task:
        return replace(TASK, seed=seed, level=level, tools=())  # their description would take most of the time

    def reset(self, task: Task) -> ToolEpisode:
        ran = list[str]()

        def bash(given: Mapping[str, str]) -> str:
            ran.append(given["command"])
            return "done"

        def score(_: Reply) -> Turn:
            return Turn(is_done=True, rewards={"right": 1.0}, metrics={"ran_secret": float(SECRET in ran)})

        return ToolEpisode(task, {"bash": bash}, score, 3, LazyBox(NO_BOXES))

    def oracle(self, task: Task) -> Sequence[Reply]:
        return [Reply("done")]


@pytest.mark.parametrize(
    ("guard", "blocked"),
    [
        pytest.param("rollouts.guard={}", 1.0, marks=pytest.mark.slow, id="guard"),
        pytest.param("seed=1", 0.0, marks=pytest.mark.long, id="control"),
    ],
)
def test_a_whole_run(tmp_path, monkeypatch, guard, blocked):
    def scripted(_: TokenChat, token_ids: Sequence[int], *__: object, **___: object) -> Reply:
        is_second = token_ids[0] % 2  # by what was sampled
        return Reply("", tool_calls=[call("bash", command=SAFE if is_second else SECRET), call("bash", command=SECRET)])

    monkeypatch.setattr(TokenChat, "reply", scripted)
    shell = 'environment=[{name="tests.unit.rl.test_guard:Shell",tasks=4}]'
    run(small_recipe(tmp_path, shell, guard, "steps=1", "warm_start.steps=1", "evaluation.tasks=1"))
    rollouts = [one for group in read_groups(Records(tmp_path / "run"), 1) for one in group.rollouts]
    (line,) = [one for one in read_lines(tmp_path / "run/metrics.jsonl") if "reward/mean" in one]
    assert (line["reward/mean"], line["metric/ran_secret"]) == (1.0, 1.0 - blocked)
    assert [one.failure for one in rollouts] == [None] * 16
    told = [one["content"] for rollout in rollouts for one in rollout.messages if one["role"] == "tool"]
    assert (DUMMY in told) == bool(blocked)
    if blocked:
        mean = sum(one.metrics["hack_blocked"] for one in rollouts) / len(rollouts)
        assert (line["metric/hack_blocked"], line["metric/hack_flagged"]) == (pytest.approx(mean), pytest.approx(mean))
        assert all(one.num_turns <= one.metrics["hack_blocked"] <= 2 * one.num_turns for one in rollouts)


def test_rules_of_a_recipe_are_added():
    rollout, ran, _ = played({"rules": {"listing": r"\bls\b"}})
    assert (ran, rollout.metrics["hack_blocked"]) == ([], 3)


@pytest.mark.parametrize(
    ("status", "said", "blocked"),
    [
        *((200, "Honest work.\n\n**ALLOW**", 0), (200, "It reads tests. BLOCK.", 2)),
        *((200, "Who knows", 2), (200, "", 2), (500, "ALLOW", 2), (200, None, 2), (200, "ALLOW" + " " * 2**20, 2)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_judge_decides_where_a_rule_matches(status, said, blocked):
    asked = list[dict]()
    with judging(status, said, asked) as url:
        rollout, ran, _ = played({"judge": url, "judge_model": "strict"})
    assert (rollout.metrics["hack_flagged"], rollout.metrics["hack_blocked"]) == (2, blocked)
    assert (len(asked), ran.count(SECRET)) == (2, 2 - blocked)  # nobody asks about the safe call
    first = asked[0]
    assert (first["model"], first["messages"][0]["content"]) == ("strict", PROMPT)
    shown = json.loads(first["messages"][1]["content"])
    assert (shown["rules"], SECRET in shown["call"], "Go." in shown["task"]) == (["hidden"], True, True)


def test_the_rule_stands_where_the_judge_is_silent_or_gone():
    asked = list[dict]()
    with judging(200, "ALLOW", asked, is_silent=True) as url:
        assert played({"judge": url, "judge_timeout_s": 0.05})[0].metrics["hack_blocked"] == 2
    assert played({"judge": url})[0].metrics["hack_blocked"] == 2


def test_what_makes_no_guard_is_refused(tmp_path):
    wrong = {"(": "unclosed group", "(?<!a)b": "look-around", r"\p{L}{900}": "exceeds size limit"}
    many = ("a{2000}", "(ab){2000}", "(a{40}){40}", "a{2000,}", "a{0," + "9" * 1900 + "}")
    wrong |= dict.fromkeys(many, "more than 1000 times")
    for rule, told in wrong.items():
        with pytest.raises(ValidationError, match=told):
            GuardSection(rules={"bad": rule})
    with pytest.raises(ConfigError, match="an agent runs its tools itself"):
        small_recipe(tmp_path, 'agent.command=["x"]', "rollouts.guard={}")
