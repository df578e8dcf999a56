"""Publishes changes of the KV cache over ZMQ in vLLM's form, so that routers know which prefixes this engine has.

    PUB frames       topic | sequence number, 8 bytes big-endian | MessagePack [time, [event, ...], data-parallel rank]
    event            a map whose "type" is BlockStored, BlockRemoved or AllBlocksCleared
    replay request   8 bytes big-endian: the first sequence number wanted
    replay answers   sequence number | MessagePack, one message for each batch that is kept; then -1 | nothing

A block is a page of the cache. Its hash is the last 64 bits of its key's digest, a chained blake2b over the identity
of the weights, the cache salt, all tokens before, and its own: to a subscriber, an opaque name. Salts are not sent:
whoever knew a tenant's could ask whether the tenant's prompts are cached.

The first batch says that all blocks are cleared: an engine that was restarted has an empty cache.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec
import zmq

from glm5.common.errors import ConfigError
from glm5.config.kv_events import KvEventsConfig
from glm5.engine.cache.changes import Change, Cleared, Place, Removed, Stored
from glm5.engine.transport.wire import KvEventSource

logger = logging.getLogger(__name__)

MEDIUM: dict[Place, str] = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 500  # for the last batches, when the engine ends
_INBOX = "inproc://kv-events"
_MASK = (1 << 64) - 1


class BlockStored(msgspec.Struct, tag=True):
    """Consecutive blocks of one prompt can be found from now on. `parent_block_hash`: the block before them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks can no longer be found in this medium."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block can be found in any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one step of the engine. `ts`: seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int


def block_hash(digest: bytes) -> int:
    """The name of a block on the wire."""
    return int.from_bytes(digest, "big") & _MASK


def events_of(changes: Iterable[Change], page_size: int) -> list[Event]:
    """Events for changes in order; consecutive changes of one prompt and medium become one event."""
    events: list[Event] = []
    for change in changes:
        last = events[-1] if events else None
        match change:
            case Stored(place, digest, parent, tokens):
                above = None if parent is None else block_hash(parent)
                if isinstance(last, BlockStored) and last.medium == MEDIUM[place] and last.block_hashes[-1] == above:
                    last.block_hashes.append(block_hash(digest))
                    last.token_ids += tokens
                    continue
                events.append(
                    BlockStored([block_hash(digest)], above, list(tokens), page_size, None, medium=MEDIUM[place])
                )
            case Removed(place, digest):
                if isinstance(last, BlockRemoved) and last.medium == MEDIUM[place]:
                    last.block_hashes.append(block_hash(digest))
                    continue
                events.append(BlockRemoved([block_hash(digest)], MEDIUM[place]))
            case Cleared():
                events.append(AllBlocksCleared())
    return events


class KvEventPublisher:
    """Sends batches from a thread of its own. `publish` and `close` are for one thread.

    Raises ConfigError if an address cannot be used.
    """

    def __init__(self, config: KvEventsConfig, page_size: int, *, rank: int = 0):
        self._page_size, self._rank = page_size, rank
        topic = config.topic or ""
        self._topic, self._encoder = topic.encode(), msgspec.msgpack.Encoder()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, "endpoint", config.endpoint, hwm=config.hwm, listens=config.listens)
            # Without a limit: an answer may have more batches than the default limit, beyond which ROUTER drops.
            replay = config.replay_endpoint
            self._replay = None if replay is None else self._open(zmq.ROUTER, "replay_endpoint", replay, hwm=0)
            self._inbox = self._context.socket(zmq.PULL)
            self._inbox.set(zmq.RCVHWM, 1)
            self._inbox.bind(_INBOX)
            self._outbox = self._context.socket(zmq.PUSH)
            self._outbox.set(zmq.SNDHWM, config.max_queue_size)
            self._outbox.connect(_INBOX)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        at = None if self._replay is None else _address(self._replay)
        self.source = KvEventSource(_address(self._pub), at, topic)
        self._thread = threading.Thread(target=self._run, name="glm5-kv-events", daemon=True)
        self._thread.start()
        self.publish([Cleared()])

    def publish(self, changes: Sequence[Change]) -> None:
        """Send the changes of a step as one batch. It waits only while `max_queue_size` batches wait to be sent."""
        batch = EventBatch(time.time(), events_of(changes, self._page_size), self._rank)
        self._outbox.send(self._encoder.encode(batch))

    def close(self) -> None:
        """Send what waits, and end."""
        self._outbox.send(b"")
        self._thread.join()
        self._outbox.close(linger=0)
        self._context.term()

    def _open(self, kind: int, key: str, address: str, *, hwm: int, listens: bool = True) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, hwm)
        socket.set(zmq.IPV6, int("[" in address))
        try:
            if listens:
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            allowed = f"an address that can be used, and {error.strerror}; give another one"
            raise ConfigError(f"kv_events_config.{key}: got {address!r}; allowed: {allowed}") from None
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        sequence = 0
        while True:
            ready = dict(poller.poll())
            if self._inbox in ready:
                payload = self._inbox.recv()
                if not payload:
                    break
                self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])
                self._kept.append((sequence, payload))
                sequence += 1
            elif self._replay is not None:
                self._answer(self._replay)
        self._inbox.close(linger=0)
        self._pub.close(linger=_LINGER_MS)
        if self._replay is not None:
            self._replay.close(linger=_LINGER_MS)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        *route, start = replay.recv_multipart()
        if len(start) != len(END):
            logger.warning("a request for replay has %d bytes instead of %d; ignored", len(start), len(END))
            return
        first = int.from_bytes(start, "big")
        with suppress(zmq.ZMQError):  # the subscriber has left
            for sequence, payload in self._kept:
                if sequence >= first:
                    replay.send_multipart([*route, sequence.to_bytes(8, "big"), payload])
            replay.send_multipart([*route, END, b""])


def _address(socket: zmq.Socket[bytes]) -> str:
    """The address in use, with the port that was chosen for a wildcard."""
    address = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
