"""Is it there? For load balancers, service managers and people. No key is needed.

/health            200 while the model answers; 503 before it has been loaded and after its engine has died
/ping              the same under SageMaker's name
/ready             the same, and 503 also while the server drains: send it nothing more
/health_generate   200 after the model has generated a token just now
"""

import asyncio
import logging

from fastapi import APIRouter, Depends, Request, Response

from glm5.common.errors import GlmError
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.http.errors import ApiError, draining
from glm5.serve.service.service import Engine, Service, get_service

logger = logging.getLogger(__name__)

router = APIRouter(tags=["health"])

PROBE_SECONDS = 20.0
WARM_UP_TOKENS = 4
_SALT = "health"  # no caller has it: theirs begin otherwise


def check_health(service: Service) -> None:
    """ApiError 503 while nothing can be answered."""
    if (reason := service.state.not_serving) is not None:
        raise ApiError(503, f"the engine is not running: {reason}", code="engine_stopped", retry_after=5)
    if (reason := service.engine.stopped_because) is not None:
        raise ApiError(503, f"the engine is not running: {reason}", code="engine_stopped", retry_after=5)


def check_ready(service: Service) -> None:
    """ApiError 503 while nothing more is taken."""
    check_health(service)
    if service.state.is_draining:
        raise draining()


@router.head("/health", include_in_schema=False)
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


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_class=Response)
async def ready(service: Service = Depends(get_service)) -> Response:
    """200 while requests are taken; 503 with the reason before, after, and while the server drains."""
    check_ready(service)
    return Response()


@router.get("/health_generate", response_class=Response)
async def health_generate(request: Request, service: Service = Depends(get_service)) -> Response:
    """200 when the model generates a token now. However many ask, the model is asked once at a time."""
    check_health(service)
    probe: Probe = request.app.state.probe
    await probe.run(service.engine)
    return Response()


class Probe:
    """A token of the model's, shared by all who ask for one at the same time."""

    def __init__(self, seconds: float = PROBE_SECONDS):
        self.seconds = seconds
        self._task: asyncio.Task[None] | None = None

    async def run(self, engine: Engine) -> None:
        """Raises ApiError 503 where none comes in time."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._generate(engine))
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # also if all have left
        await asyncio.shield(self._task)  # who leaves does not end it for the others

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
    """Have the model answer a prompt of one token."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async with engine.generate([0], params, request_id="health", cache_salt=_SALT) as deltas:
        async for _ in deltas:
            pass


def warm_up(engine: Engine) -> None:
    """Have the model answer once before anybody waits for it: what is compiled at first use, is compiled now."""
    if (room := engine.max_model_len - 1) > 0:
        asyncio.run(generate_one(engine, min(room, WARM_UP_TOKENS)))
