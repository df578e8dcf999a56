"""Numbers of passes that a schedule of the pipeline takes."""

from types import SimpleNamespace

import pytest

from glm5.common.errors import ConfigError
from glm5.train.parallel.pipeline import PipelineStep


def refuses(num_passes, *, ranks, stages, zero_bubble):
    step = SimpleNamespace(
        team=SimpleNamespace(mesh=SimpleNamespace(pipeline=ranks)),
        stages=[None] * stages,
        _queue=object() if zero_bubble else None,
    )
    try:
        PipelineStep._check_num_passes(step, num_passes)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize(("stages", "zero_bubble"), [(1, True), (2, False), (2, True)])
def test_passes_that_schedules_of_several_rounds_take(stages, zero_bubble):
    found = [n for n in range(1, 13) if not refuses(n, ranks=4, stages=stages, zero_bubble=zero_bubble)]
    # Rounds are passes // ranks, and must divide the passes (torch's ScheduleInterleaved1F1B and ZeroBubble).
    assert found == [4, 5, 6, 7, 8, 10, 12]


def test_one_stage_without_zero_bubble_takes_any_number_from_the_ranks_on():
    assert [n for n in range(1, 13) if refuses(n, ranks=4, stages=1, zero_bubble=False)] == [1, 2, 3]
