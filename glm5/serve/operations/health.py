"""Health checks for load balancers, service managers and people. They need no API key.

/health            200 while the model answers; 503 until it has been loaded and after its engine has died
/ping              the same under SageMaker's name
/ready             the same, and 503 also while the server drains: a load balancer should send no more requests
/health_generate   200 if the model generates a token now
"""

import asyncio
import logging

from fastapi import APIRouter, Depends, Request, Response

from glm5.common.errors import GlmError
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.http.errors import ApiError, draining, main_process_silent
from glm5.serve.service.service import Engine, Service, get_service

logger = logging.getLogger(__name__)

router = APIRouter(tags=["health"])

PROBE_SECONDS = 20.0
WARM_UP_TOKENS = 4
_SALT = "health"  # no tenant has this cache salt: theirs are empty or contain ":" or "/"


def check_health(service: Service) -> None:
    """Raises ApiError 503 while the model cannot answer."""
    if service.state.is_main_silent:
        raise main_process_silent()
    if (reason := service.state.not_serving) is not None:
        raise ApiError(503, f"the engine is not running: {reason}", code="engine_stopped", retry_after=5)
    if (reason := service.engine.stopped_because) is not None:
        raise ApiError(503, f"the engine is not running: {reason}", code="engine_stopped", retry_after=5)


def check_ready(service: Service) -> None:
    """Raises ApiError 503 while the server accepts no new requests."""
    check_health(service)
    if service.state.is_draining:
        raise draining()


@router.get("/health", response_class=Response)
async def health(service: Service = Depends(get_service)) -> Response:
    """200 while requests are answered; 503 with the reason before and after."""
    check_health(service)
    return Response()


@router.post("/ping", include_in_schema=False)
@router.get("/ping", response_class=Response)
async def ping(service: Service = Depends(get_service)) -> Response:
    """/health under SageMaker's name."""
    return await health(service)


@router.get("/ready", response_class=Response)
async def ready(service: Service = Depends(get_service)) -> Response:
    """200 while new requests are accepted; 503 with the reason before, after, and while the server drains."""
    check_ready(service)
    return Response()


@router.get("/health_generate", response_class=Response)
async def health_generate(request: Request, service: Service = Depends(get_service)) -> Response:
    """200 when the model generates a token now. Concurrent checks share one generation."""
    check_health(service)
    probe: Probe = request.app.state.probe
    await probe.run(service.engine)
    return Response()


class Probe:
    """Generates one token, for all concurrent health checks together."""

    def __init__(self, seconds: float = PROBE_SECONDS):
        self.seconds = seconds
        self._task: asyncio.Task[None] | None = None

    async def run(self, engine: Engine) -> None:
        """Raises ApiError 503 when no token is generated in time."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._generate(engine))
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # marks it as retrieved
        await asyncio.shield(self._task)  # a client that disconnects does not cancel it for the others

    async def _generate(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                await generate_one(engine)
        except TimeoutError:
            message = f"the model has not generated a token within {self.seconds:g} s"
            raise ApiError(503, message, code="engine_slow", retry_after=5) from None
        except GlmError as error:
            raise ApiError(503, f"the model cannot generate a token: {error}", code="engine_stopped") from None


async def generate_one(engine: Engine, num_tokens: int = 1) -> None:
    """Generate from a prompt of one token."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async with engine.generate([0], params, request_id="health", cache_salt=_SALT) as deltas:
        async for _ in deltas:
            pass


def warm_up(engine: Engine) -> None:
    """Generate once before the server takes requests: this compiles what is compiled at first use."""
    if (room := engine.max_model_len - 1) > 0:
        asyncio.run(generate_one(engine, min(room, WARM_UP_TOKENS)))
