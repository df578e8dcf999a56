"""GET /metrics for Prometheus. Values are sums over all tenants, so the route needs a key of the role metrics."""

from fastapi import APIRouter, Depends, Response

from glm5.common.errors import GlmError
from glm5.serve.metrics.prometheus import CONTENT_TYPE
from glm5.serve.service.service import Service, get_service

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=Response)
async def metrics(service: Service = Depends(get_service)) -> Response:
    """Counters, gauges and histograms under vLLM's names, in Prometheus' text format."""
    server_metrics, stats, has_engine = service.metrics, None, True
    try:
        stats = await server_metrics.read_engine(service.engine)  # None if it does not answer in time
    except GlmError:
        has_engine = False
    # Only what is kept for the whole server is shown, so that counters do not go back when this process is killed.
    figures = await service.shared.figures(server_metrics.page.totals(), service.state.num_active, stats)
    if stats is None and figures.stats is not None:  # not older ones than another process has shown
        server_metrics.set_engine_stats(figures.stats)
    if not has_engine:
        for gauge in (server_metrics.running, server_metrics.waiting, server_metrics.kv_usage):
            gauge.set(0)
    server_metrics.up.set(service.state.not_serving is None and service.engine.stopped_because is None)
    server_metrics.restarts.set_total(service.state.num_restarts)
    server_metrics.in_flight.set(figures.num_active)
    return Response(server_metrics.page.text(figures.totals), media_type=CONTENT_TYPE)
