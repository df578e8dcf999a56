"""Failures of requests: errors are counted by `kind`; the message is the server's or the socket's."""

from glm5.common.errors import GlmError

CONNECT, DISCONNECTED, TIMEOUT = "connect", "disconnected", "timeout"
BAD_ANSWER, IN_STREAM, NO_TOKENS, CUT_OFF = "bad answer", "error in stream", "no tokens", "cut off"


class RequestFailed(GlmError):
    """One request failed. `kind`: one of this file's constants, or "http STATUS"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message
