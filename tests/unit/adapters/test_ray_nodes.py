"""Processes of a run on the nodes of a local Ray cluster, of which one is lost."""

from pathlib import Path

import pytest

from glm5.rl.loop import run
from tests.support.rl_recipe import small_recipe
from tests.support.whole_runs import killing_engine, steps_of
from tests.unit.rl.test_async_run import ASYNC, check

TWO = 'rollouts.devices=["cpu", "cpu"]'


@pytest.fixture
def cluster():
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=3)
        yield made
    finally:
        made.shutdown()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_run_on_two_nodes_goes_on_after_the_loss_of_an_engine(cluster, tmp_path, monkeypatch, caplog):
    from glm5.adapters.ray_nodes import RayNodes

    killing_engine(monkeypatch, [12])
    with RayNodes(cluster.address) as nodes:
        recipe = small_recipe(tmp_path, *ASYNC, TWO, f'ray="{cluster.address}"')
        run(recipe, launcher=nodes.launch)
        hosts = {json_of(path)["port"] for path in Path(nodes._folder.name).iterdir()}
    assert len(hosts) >= 4, "a trainer, two engines and a worker"
    check(tmp_path / "run", 1, 5)
    assert max(line["engines/lost"] for line in steps_of(tmp_path / "run")) == 1
    assert "its requests go on elsewhere" in caplog.text


def json_of(path: Path) -> dict:
    import json

    return json.loads(path.read_text())
