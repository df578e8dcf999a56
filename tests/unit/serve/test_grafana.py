"""The dashboard for Grafana asks for nothing that the server does not have."""

import json
import re
from pathlib import Path

from glm5.serve.metrics.server_metrics import ServerMetrics

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"
METRIC = re.compile(r"\b(?:vllm|glm5):\w+|\bhttp_requests_total\b")


def asked_for() -> set[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [str(variable["query"]) for variable in dashboard["templating"]["list"]]
    return {name.removesuffix("_bucket") for query in queries for name in METRIC.findall(query)}


def test_every_metric_of_the_dashboard_is_one_of_the_server():
    known = set(re.findall(r"^# TYPE (\S+)", ServerMetrics("tiny").page.text(), flags=re.MULTILINE))
    assert asked_for() <= known
    # What the dashboard leaves out: figures for the load generator's eyes, one for those who train, one for
    # those who measure, a bug's count, a failing disk's or memory's, and two that routers read.
    assert known - asked_for() == {
        "glm5:engine_steps_total",
        "glm5:engine_tokens_total",
        "glm5:weight_version",
        "glm5:kernels_built_late_total",
        "glm5:kv_tier_damaged_pages_total",
        "glm5:simulated_acceptance",
        "vllm:cache_config_info",
        "vllm:gpu_prefix_cache_hit_rate",
    }


def test_panels_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
