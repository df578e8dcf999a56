"""GET /metrics: Prometheus' page, for those who may see what all callers do together."""

import asyncio

from fastapi import APIRouter, Depends, Response

from glm5.common.errors import GlmError
from glm5.serve.metrics.prometheus import CONTENT_TYPE
from glm5.serve.service.service import Service, get_service

router = APIRouter(tags=["health"])

STATS_SECONDS = 1.0  # an engine in the middle of a long step answers after it; then the last figures stand


@router.get("/metrics", response_class=Response)
async def metrics(service: Service = Depends(get_service)) -> Response:
    """Counters, gauges and histograms under vLLM's names, in Prometheus' text format."""
    found = service.metrics
    try:
        async with asyncio.timeout(STATS_SECONDS):
            found.take_stats(await service.engine.stats())
    except TimeoutError:
        pass
    except GlmError:
        for gauge in (found.running, found.waiting, found.kv_usage):
            gauge.set(0)
    found.up.set(service.state.not_serving is None and service.engine.stopped_because is None)
    found.in_flight.set(service.state.num_active)
    return Response(found.page.text(), media_type=CONTENT_TYPE)
