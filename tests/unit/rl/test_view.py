"""The pages of a run: all are there, what they show is escaped, and a wrong address or a damaged record is one line."""

import json
import math
import threading
import xml.etree.ElementTree as ElementTree
from random import Random

import httpx
import pytest

from glm5.common.errors import GlmError
from glm5.common.plot import plot
from glm5.config.rl import RLRecipe
from glm5.rl.records.store import Records, RecordWriter
from glm5.rl.records.trace import Node
from glm5.rl.report import write_report
from glm5.rl.rollout import Group
from glm5.rl.view import pages
from glm5.rl.view.server import serving
from glm5.rl.view.tokens import COLOURS, Token, tokens_of
from glm5.rl.view.tree import tree
from tests.support.rl_run import random_rollout, task_of, viewed, write_run
from tests.unit.rl.test_records import write


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, and a client of its pages."""
    out = tmp_path_factory.mktemp("runs") / "guess<1>"
    write_run(out)
    with viewed(out) as client:
        yield out, client


def body(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text[text.index("<body>") : text.index("</html>")])


def words(element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_the_run_has_steps_and_curves(run):
    page = body(run[1].get("/").text)
    assert [words(one).split()[0] for one in page.findall(".//main/p/a")] == ["1", "2", "3"]
    labels = [one.get("aria-label") for one in page.findall(".//svg")]
    assert labels == ["reward/mean, eval/mean by step", "entropy by step", "time/step by step"]


def test_groups_come_by_reward(run):
    page = body(run[1].get("/steps/2").text)
    rows = [[words(cell) for cell in row.findall("td")] for row in page.findall(".//tr")][1:]
    means = [float(row[4]) for row in rows]
    assert means == sorted(means, reverse=True)
    assert sorted(row[0] for row in rows) == ["0", "1", "2", "3"]
    for chips in page.findall(".//tr")[1:]:
        rewards = [float(one.text or "") for one in chips.findall(".//span")]
        assert rewards == sorted(rewards, reverse=True)


@pytest.mark.parametrize("colour", COLOURS)
def test_a_conversation_is_shown_token_by_token(run, colour):
    out, client = run
    trace = Records(out).group(3, 1)[2]
    page = body(client.get("/steps/3/groups/1", params={"rollout": 2, "colour": colour}).text)
    spans = page.findall(".//section[@class='segment sampled']/p/span")
    tokens = [token for node in trace.nodes if node.sampled for _, token in tokens_of(node)]
    assert [one.get("title") for one in spans] == [token.facts().replace("\n", " ") for token in tokens]
    assert [one.get("class") for one in spans] == [COLOURS[colour][0](token, 0.6) for token in tokens]
    assert "".join(one.text or "" for one in spans) == "".join(
        f"<think>{one['reasoning_content']}</think>{one['content']}<|user|>"
        for one in trace.info.messages
        if one["role"] == "assistant"
    )
    assert words(page.findall(".//section")[0]).endswith("<|user|>Guess 1 to 15<|assistant|>")


def node(parent, count, *, masked=None, versions=(), sampled=False) -> Node:
    columns = {"masked": masked, "versions": list(versions), "logprobs": [-1.0] * len(versions)}
    return Node([0] * count, [sampled] * count, parent, {}, sampled, **columns)


def test_a_tree_has_a_row_for_each_branch(run):
    out, _ = run
    trace = Records(out).group(3, 1)[2]
    trace.nodes = [
        node(None, 100),
        node(0, 20, sampled=True, versions=[2] * 10 + [3] * 10, masked=[False] * 20),
        node(0, 50),  # the history was edited
        node(2, 10, sampled=True, versions=[3] * 10),
        node(1, 30),
        node(None, 5),  # a sub-agent
        node(99, 1),  # of a damaged record
    ]
    text = tree(trace, lambda number, token: f"/x?first={token}&a=<#segment-{number}")
    page = ElementTree.fromstring(text)
    places = [(float(one.get("x")), int(one.get("y"))) for one in page.findall(".//rect")]
    scale = 640 / 160
    assert [y // 26 for _, y in places] == [0, 0, 1, 1, 0, 2, 3]
    assert [round(x / scale) for x, _ in places] == [0, 100, 100, 150, 120, 0, 0]
    kinds = [one.get("class") for one in page.findall(".//rect")]
    assert kinds[1] == "node trained"
    assert kinds[3] == "node untrained"
    assert set(kinds) - set(kinds[1:4:2]) == {"node context"}
    titles = [one.text for one in page.findall(".//title")]
    assert titles[1] == "segment 1, after segment 0: 20 tokens, sampled, trained, weights of version 2 to 3"
    assert titles[3] == "segment 3, after segment 2: 10 tokens, sampled, not trained, weights of version 3"
    assert [one.get("href") for one in page.findall(".//a")][4] == "/x?first=180&a=<#segment-4"
    assert len(page.findall(".//line")) == 1
    assert "7 segments, branches: 4" in words(page)


def test_a_segment_of_the_tree_leads_to_its_text(run):
    page = body(run[1].get("/steps/3/groups/1", params={"rollout": 2, "colour": "mask"}).text)
    links = [one.get("href") for one in page.findall(".//svg[@class='tree']/a")]
    names = [one.get("id") for one in page.findall(".//section")]
    assert [link.rpartition("#")[2] for link in links] == names
    assert links[0] == "/steps/3/groups/1?rollout=2&colour=mask&first=0#segment-0"


def test_the_run_shows_who_waited(tmp_path):
    write_run(tmp_path / "run")
    line = {"step": 4, "time/step": 2.0, "time/train": 1.5, "time/rollout": 0.5, "wait/trainer": 0.25}
    with (tmp_path / "run/metrics.jsonl").open("a") as handle:
        handle.write(json.dumps(line) + "\n")
    page = body(pages.RunPages(tmp_path / "run").page([], {}))
    (picture,) = page.findall(".//svg[@class='timeline']")
    assert [one.get("width") for one in picture.findall("rect")] == ["160.00", "480.00", "0.00", "0.00"]
    assert "trainer waited 25 %" in words(page)


def test_colours_of_a_token():
    token = Token(-1.5, 0, -1.0, -0.25, 0.0, 1.0, masked=True)
    kinds = {name: paint(token, 0.5) for name, (paint, _) in COLOURS.items()}
    assert kinds == {"log-probability": "q2", "ratio": "p4", "advantage": "n2", "mask": "masked"}
    untrained = Token(-90.0, 0, None, None, None, None, masked=None)
    kinds = {name: paint(untrained, 0.5) for name, (paint, _) in COLOURS.items()}
    assert kinds == {"log-probability": "q5", "ratio": "", "advantage": "", "mask": ""}
    assert "trainer" not in untrained.facts()


@pytest.mark.parametrize(
    "path",
    [
        "/steps/9",
        "/steps/x",
        "/steps/-1",
        "/steps/1/groups/4",
        "/steps/1/groups/0?rollout=8",
        "/steps/1/groups/0?colour=red",
        "/steps/1/groups/0?rollout=%31%00",
        "/page/pages.py",
        "/page/..%2fpages.py",
        "/nothing",
        "/steps/" + "9" * 400,
    ],
)
def test_other_addresses_are_not_found(run, path):
    answer = run[1].get(path)
    assert (answer.status_code, "There is no such page." in answer.text) == (404, True)


def test_pages_are_sent_with_what_keeps_them_safe(run):
    for path in ("/", "/page/base.css", "/page/view.css", "/page/icon.svg", "/nothing"):
        answer = run[1].get(path)
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "<script" not in answer.text
        assert " style=" not in answer.text
    head = run[1].head("/steps/1")
    assert (head.content, int(head.headers["Content-Length"])) == (b"", len(run[1].get("/steps/1").content))


def test_texts_are_escaped_and_long_lists_divided(tmp_path, run, monkeypatch):
    evil = "<script>alert(1)</script>"
    task = task_of(1)
    rollouts = [random_rollout(Random(one), task) for one in range(3)]
    rollouts[0].messages = []
    rollouts[1].metrics = {evil: 1.0}
    rollouts[2].failure, rollouts[2].failure_reason = "sandbox", evil
    write_run(tmp_path / "run")
    write(tmp_path / "run", 9, [Group(0, task, rollouts)] * 3)
    monkeypatch.setattr(pages, "MAX_GROUPS", 2)
    monkeypatch.setattr(pages, "MAX_CHIPS", 1)
    of = pages.RunPages(tmp_path / "run")
    for number in range(3):
        text = of.page(["steps", "9", "groups", "0"], {"rollout": str(number)})
        body(text)
        assert "<script" not in text
    page = body(of.page(["steps", "9"], {"first": "2"}))
    assert len(page.findall(".//tr")) == 2
    assert "and 2 more" in words(page)
    assert words(page.findall(".//main/p")[0]) == "Groups from 0 2 of 3"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_numbers_beyond_all_bounds_are_shown_as_they_are(tmp_path, value, seed):
    write_run(tmp_path / "run", steps=1)
    random = Random(seed)
    rollouts = [random_rollout(random, task_of(1)) for _ in range(4)]
    rollouts[0].rewards = {"answer": value, "form": value}
    rollouts[1].metrics = {"guesses": value}
    of = [[None if not one.is_sampled else {"trainer_logprobs": [value] * len(one.token_ids),
                                            "advantages": [value, 0.5, *[math.nan] * len(one.token_ids)]}
           for one in rollout.tree.segments] for rollout in rollouts]  # fmt: skip
    for one in (one for rollout in rollouts[2:] for one in rollout.tree.segments if one.is_sampled):
        one.logprobs = [value] * len(one.logprobs)
    RecordWriter(tmp_path / "run", 2**30, 1).write(1, 1, {}, [Group(0, task_of(1), rollouts)], [of])
    with (tmp_path / "run/metrics.jsonl").open("w") as handle:
        for step in range(3):
            line = {"step": step, "reward/mean": [value, 0.5, -value][step], "wait/trainer": value, "time/step": 2.0}
            handle.write(json.dumps(line | {"time/train": value}) + "\n")
    of = pages.RunPages(tmp_path / "run")
    assert f"{value:.3g}" in words(body(of.page([], {})))
    assert f"{2 * value:.3g}" in words(body(of.page(["steps", "1"], {})))
    for number in range(4):
        for colour in COLOURS:
            page = body(of.page(["steps", "1", "groups", "0"], {"rollout": str(number), "colour": colour}))
            kinds = {span.get("class") for span in page.findall(".//section[@class='segment sampled']/p/span")}
            assert kinds <= {"", "masked", *(f"{kind}{shade}" for kind in "qnp" for shade in range(6))}
            facts = [span.get("title") for span in page.findall(".//section[@class='segment sampled']/p/span")]
            assert f"advantage {value:.6g} " in facts[0]
            assert number < 2 or facts[0].startswith(f"log-probability {value:.6g} ")
    recipe = RLRecipe.model_validate(
        {"name": "a", "steps": 3, "lr": 1.0, "model": {"preset": "nano"}, "environment": [{"name": "guess"}]}
    )
    assert "nan" not in write_report(tmp_path / "run", recipe).read_text() or math.isnan(value)


def test_a_damaged_record_is_one_line(tmp_path):
    write_run(tmp_path / "run")
    path = Records(tmp_path / "run").path(2)
    path.write_bytes(path.read_bytes()[:40])
    with serving(tmp_path / "run", "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        answer = httpx.get(f"http://127.0.0.1:{server.server_port}/steps/2")
        thread.join()
    assert (answer.status_code, "it ends too early" in answer.text) == (500, True)


def test_only_a_run_is_served(tmp_path, run):
    with pytest.raises(GlmError, match=r"no recipe\.json"), serving(tmp_path, "127.0.0.1", 0):
        pass
    with (
        serving(run[0], "127.0.0.1", 0) as server,
        pytest.raises(GlmError, match="--port 0"),
        serving(run[0], "127.0.0.1", server.server_port),
    ):
        pass


def test_the_report_has_a_table_and_every_metric(tmp_path):
    write_run(tmp_path / "run")
    recipe = RLRecipe.model_validate(
        {"name": "a", "steps": 3, "lr": 1.0, "model": {"preset": "nano"}, "environment": [{"name": "guess"}]}
    )
    text = write_report(tmp_path / "run", recipe).read_text()
    page = ElementTree.fromstring(f"<page>{text[text.index('<h1>') : text.index('</html>')]}</page>")
    assert [row.findtext("th") for row in page.findall(".//tr")][1:] == [
        "reward/mean",
        "eval/mean",
        "entropy",
        "time/step",
    ]
    assert len(page.findall(".//svg")) == 3


def test_a_plot_without_points_is_empty():
    assert plot({"a": []}, 3) == ""
