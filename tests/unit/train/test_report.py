"""The page of a run: every stage in its table, every figure that was recorded as a curve, valid as XML."""

import json
import xml.etree.ElementTree as ElementTree

from glm5.common.plot import MOST_POINTS, WIDTH
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
    assert [x for x, _ in points] == [WIDTH * i / 8 for i in range(1, 9)]
    assert points[0][1] < points[3][1] == points[7][1], "a smaller loss is lower on the page"


def test_long_runs_are_thinned(tmp_path):
    page = page_of(tmp_path, [step("a", i, loss=1.0) for i in range(5 * MOST_POINTS)])
    curve = page.find(".//polyline")
    assert curve is not None
    assert len(curve.get("points", "").split()) <= MOST_POINTS


def test_a_run_that_recorded_nothing_has_a_page(tmp_path):
    assert page_of(tmp_path, []).find(".//svg") is None
