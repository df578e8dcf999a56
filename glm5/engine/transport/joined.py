"""The link of a further client to an engine process that another process started and watches over.

    FOLDER/to-engine      the engine's inbox; every client connects a socket to it
    FOLDER/to-client-7    the inbox of client 7, which the engine connects to when it gets `Join(7)`

This process has no pipe to the engine. Whoever watches the engine calls `end` with the reason when it has ended, and
sends the engine `Leave` when this process has.
"""

import os
import threading

import msgspec
import zmq

from glm5.engine.transport.link import CLOSED, received
from glm5.engine.transport.wire import INBOX, OUTBOX, Close, Dead, Join, ToClient, ToEngine

_RECONNECT_MS = 5  # until the engine has opened its end
_QUIET_MS = 20  # the engine has ended: once nothing has arrived for this long, no message of it is still in flight


class JoinedLink:
    """A `Link` as client `client` (1 or more, never used before with this engine). Closing it leaves the engine as it
    is; `end` may be called from any thread."""

    is_forked = False

    is_elsewhere = False

    def __init__(self, folder: str, client: int):
        self.client, self.ended = client, False
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToClient)
        self._reason: str | None = None
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        self._context = zmq.Context()
        self._inbox, self._outbox = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._inbox.set(zmq.RCVHWM, 0)
        self._outbox.set(zmq.SNDHWM, 0)
        self._outbox.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._inbox.bind(f"ipc://{folder}/{OUTBOX}-{client}")
        self._outbox.connect(f"ipc://{folder}/{INBOX}")
        self._bell, self._ring = os.pipe()  # wakes the receiving thread
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)
        self.send(Join(client))

    def send(self, *messages: ToEngine) -> None:
        """Without effect once the engine has ended. `Close` only ends this link."""
        sent = [message for message in messages if not isinstance(message, Close)]
        with self._sending:
            if sent and not self.ended:
                self._outbox.send(self._encoder.encode(sent))
        if len(sent) < len(messages):
            self.end(CLOSED)

    def receive(self, timeout: float) -> list[ToClient]:
        with self._receiving:
            if self.ended:
                return []
            self._poller.poll(round(timeout * 1000))
            messages = self._drain()
            if self._reason is None:
                return messages
            while self._reason != CLOSED and self._inbox.poll(_QUIET_MS):
                messages += self._drain()
            self._release()
            return [*messages, Dead(self._reason)]

    def end(self, reason: str) -> None:
        """Make the receiving thread return `Dead` with this reason; only the first one counts."""
        with self._sending:
            if self._reason is None:
                self._reason = reason
                os.write(self._ring, b".")

    def kill(self) -> None:
        self.end(CLOSED)
        with self._receiving:
            if not self.ended:
                self._release()

    def _drain(self) -> list[ToClient]:
        return received(self._inbox, self._decoder)

    def _release(self) -> None:
        with self._sending:
            self.ended = True
            self._inbox.close(linger=0)
            self._outbox.close(linger=0)
            self._context.term()
            os.close(self._bell)
            os.close(self._ring)
