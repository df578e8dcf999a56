"""The page where a person compares replies: blind, written as pairs and anchors, and closed to other pages."""

import json
import re

import pytest

from glm5.rl.rewards.anchors import _read
from glm5.rl.rollout import Group, Rollout
from glm5.rl.segments import Segment
from glm5.rl.view.server import MAX_FORM
from tests.support.rl_run import task_of, viewed, write_run
from tests.unit.rl.test_records import write


@pytest.fixture
def run(tmp_path):
    """The folder of a run of which step 1 has a group to compare, and one whose replies are alike."""
    write_run(tmp_path)
    groups = [group(0, "bad <b>", "good", "good"), group(1, "same", "same")]
    write(tmp_path, 4, groups)
    with viewed(tmp_path) as client:
        yield tmp_path, client


def group(number: int, *said: str) -> Group:
    task = task_of(number)
    found = []
    for one in said:
        rollout = Rollout(task, number, rewards={"right": 0.123})
        rollout.messages = [*task.messages, {"role": "assistant", "content": one}]
        root = rollout.tree.add(Segment([1, 2]))
        rollout.tree.add(Segment([3], root, is_sampled=True, logprobs=[-1.0], versions=[0]))
        found.append(rollout)
    return Group(number, task, found)


def token_of(page: str) -> str:
    (found,) = re.findall(r'name="token" value="([^"]+)"', page)
    return found


def rows(out, name: str) -> list[dict]:
    file = out / "ratings" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_person_compares_blind_and_the_verdict_is_a_pair_and_an_anchor(run):
    out, client = run
    page = client.get("/rate/4/0")
    assert page.status_code == 200
    assert "bad &lt;b&gt;" in page.text
    assert "0.123" not in page.text
    assert "form-action 'self'" in page.headers["Content-Security-Policy"]
    order = re.findall(r"<h2>([AB])</h2><p><b>assistant</b></p><pre>([^<]*)</pre>", page.text)
    letter = next(letter for letter, said in order if said == "good")
    form = {"token": token_of(page.text), "better": letter, "anchor": "1", "own": " mine "}
    answer = client.post("/rate/4/0", data=form)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/rate/4/1")
    (pair,) = rows(out, "pairs")
    assert [pair[key][-1]["content"] for key in ("chosen", "rejected")] == ["good", "bad <b>"]
    assert pair["chosen"][:-1] == pair["rejected"][:-1] == [dict(one) for one in task_of(0).messages]
    assert [row["messages"][-1]["content"] for row in rows(out, "anchors")] == ["good", "mine"]
    assert _read(json.dumps(rows(out, "anchors")[1]), "a row")[0][-1]["role"] == "assistant"  # of [reward.anchors]
    assert "last group" in client.get("/rate/4/1").text  # replies that are alike are passed over


def test_only_a_form_of_this_server_counts(run):
    out, client = run
    token = token_of(client.get("/rate/4/0").text)
    for path, form in (
        ("/rate/4/0", {"better": "A"}),
        ("/rate/4/0", {"better": "A", "token": "x"}),
        ("/rate/4/0", {"better": "A", "token": "é"}),
        ("/rate/4/0", {"better": "C", "token": token}),
        ("/rate/4/1", {"better": "A", "token": token}),
        ("/rate/9/0", {"better": "A", "token": token}),
        ("/steps/4", {"better": "A", "token": token}),
        ("/rate/4/0", {"better": "A", "token": token, "own": "x" * MAX_FORM}),
    ):
        assert client.post(path, data=form).status_code == 400
    assert not (out / "ratings").exists()
