"""A request, and a connection, leave nothing behind that only a garbage collection finds."""

import gc

import httpx
import pytest

ASK = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": ASK, "max_tokens": 9},
}
MADE_HERE = ("glm5.", "starlette.", "uvicorn.", "fastapi.", __name__)


class _Cyclic:
    """What the test must find."""

    def __init__(self) -> None:
        self.itself = self


def left_behind(ask) -> set[str]:
    """Classes of the garbage that `ask` leaves."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        ask()
        gc.collect()
        return {type(one).__name__ for one in gc.garbage if type(one).__module__.startswith(MADE_HERE)}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_answered_requests(scripted_server, engine, path, stream):
    def ask() -> None:
        for _ in range(3):  # the last one's tasks may not have ended
            with httpx.Client(base_url=scripted_server[0], timeout=20) as client:
                for _ in range(2):
                    assert client.post(path, json=ROUTES[path] | {"stream": stream}).status_code == 200

    assert left_behind(ask) == set()
    assert left_behind(_Cyclic) == {"_Cyclic"}
