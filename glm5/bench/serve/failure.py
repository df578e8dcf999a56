"""Why a request has no result: `kind` is what errors are counted by, the message is the server's or the socket's."""

from glm5.common.errors import GlmError

CONNECT, DISCONNECTED, TIMEOUT = "connect", "disconnected", "timeout"
BAD_ANSWER, IN_STREAM, NO_TOKENS, CUT_OFF = "bad answer", "error in stream", "no tokens", "cut off"


class RequestFailed(GlmError):
    """One request of the load failed. `kind`: one of this file's names, or "http 503" and its like."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message
