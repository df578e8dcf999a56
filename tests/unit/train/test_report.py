"""The page of a run: every stage in its table, every figure that was recorded as a curve, valid as XML."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from glm5.common.plot import LEFT, MOST_POINTS, RIGHT, WIDTH, plot, ticks
from glm5.train.report import write_report
from tests.support.training import recipe, stage


def page_of(tmp_path, records):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    of = recipe(tmp_path, "out", stage("a", steps=4), stage("b", "warmup", steps=4))
    text = write_report(tmp_path, of).read_text()
    body = text[text.index("<h1>") : text.index("</html>")]
    return ElementTree.fromstring(f"<page>{body}</page>")


def step(stage, number, **metrics):
    return {"stage": stage, "step": number, "seconds": 1.0, **metrics}


def test_stages_and_figures_are_shown(tmp_path):
    records = [step("a", i + 1, loss=4.0 - i) for i in range(4)]
    records += [{"stage": "a", "step": 4, "held out": True, "held-out loss": 1.5}]
    records += [step("b", i + 1, loss=1.0, index=0.5) for i in range(4)]
    page = page_of(tmp_path, records)
    rows = [[cell.text or "" for cell in row] for row in page.findall(".//tr")][1:]
    assert rows == [["a", "pretrain", "4", "64", "1", "1.5", "4 s"], ["b", "warmup", "4", "64", "1", "", "4 s"]]
    labels = [svg.get("aria-label") for svg in page.findall(".//svg")]
    assert labels == ["loss, held-out loss by step", "index by step"]
    curve = page.find(".//polyline")
    assert curve is not None
    points = [tuple(map(float, point.split(","))) for point in curve.get("points", "").split()]
    assert [x for x, _ in points] == [round(LEFT + (WIDTH - LEFT - RIGHT) * i / 8, 1) for i in range(1, 9)]
    texts = [text.text for text in page.findall(".//svg")[0].findall("text")]
    assert texts == ["1", "2", "3", "4", "0", "2", "4", "6", "8", "loss, held-out loss (nats)", "step"]
    assert points[0][1] < points[3][1] == points[7][1], "a smaller loss is lower on the page"


def test_long_runs_are_thinned(tmp_path):
    page = page_of(tmp_path, [step("a", i, loss=1.0) for i in range(5 * MOST_POINTS)])
    curve = page.find(".//polyline")
    assert curve is not None
    assert len(curve.get("points", "").split()) <= MOST_POINTS


def test_a_run_that_recorded_nothing_has_a_page(tmp_path):
    assert page_of(tmp_path, []).find(".//svg") is None


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 8, ["0", "2", "4", "6", "8"]),
        (0, 1, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (5.12, 5.19, ["5.12", "5.14", "5.16", "5.18"]),
        (-3, 12, ["0", "5", "10"]),
        (0, 120_000, ["0", "50,000", "100,000"]),
        (1e-6, 4e-6, ["1e-06", "2e-06", "3e-06", "4e-06"]),
        (2.5, 2.5, ["2.5"]),
        (-1e308, 1e308, ["-1e+308", "-5e+307", "0", "5e+307", "1e+308"]),
        (0, 5e-324, ["0", "4.941e-324"]),
        (1e16, 1e16 + 2, ["1e+16"]),
    ],
)
def test_ticks_are_round_and_tell_values_apart(low, high, texts):
    found = ticks(low, high)
    assert [text for _, text in found][: len(texts)] == texts
    assert len(found) <= 12
    assert all(low <= value <= high for value, _ in found)


def test_a_tick_lies_where_its_value_is_drawn():
    page = ElementTree.fromstring(plot({"a": [(0, 1.0), (5, 3.0), (10, 2.0)]}, 10, y="nats"))
    curve = page.find(".//polyline")
    assert curve is not None
    heights = [point.split(",")[1] for point in curve.get("points", "").split()]
    lines = {line.get("y1") for line in page.iter("line") if line.get("y1") == line.get("y2")}
    assert set(heights) <= lines
    numbers = [text for text in page.iter("text") if text.get("text-anchor") == "end"]
    places = {text.text: float(text.get("y", "0")) - 4 for text in numbers}
    assert [places["1.0"], places["3.0"], places["2.0"]] == [float(y) for y in heights]
