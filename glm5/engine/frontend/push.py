"""Sends tensors to the engine in buckets, from a thread of its own, while the engine writes the bucket before.

Buckets go through host memory (`Buffers`), or between GPUs by a collective (`Broadcaster`).
"""

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any

from glm5.checkpoint.broadcaster import OwnChannels
from glm5.checkpoint.handover import NUM_BUFFERS, Channel, TensorStream, buckets_of, size_of
from glm5.common.background import in_background
from glm5.common.errors import GlmError, reason_of
from glm5.engine.frontend.client import Client
from glm5.engine.transport.wire import Bucket, Policy, PushCall, PushedTensor


def push(
    client: Client,
    stream: TensorStream,
    policy: Policy,
    version: int | None,
    max_key_age: int = 0,
    broadcaster: Channel | None = None,
) -> "Future[dict[str, Any]]":
    """Send all tensors, by `broadcaster` where there is one. The future has the engine's answer; while it is not done,
    `client` must be pumped. Raises CheckpointError when there is not enough memory for the buffers."""
    buckets = buckets_of(stream.layout)
    channel = broadcaster or (stream.channels or OwnChannels()).buffers(max([1, *map(size_of, buckets)]))
    announced = [
        [
            PushedTensor(layout.name, layout.dtype, layout.shape, start, start + layout.num_bytes)
            for layout, start in bucket
        ]
        for bucket in buckets
    ]
    pid, buffers, address = channel.place
    ids: list[int] = []

    def make(call_id: int) -> PushCall:
        ids.append(call_id)
        return PushCall(call_id, pid, buffers, announced, policy, version, max_key_age, address)

    def send() -> None:
        tensors, unread = iter(stream.tensors), deque[Future[dict[str, Any]]]()
        try:
            for number, bucket in enumerate(buckets):
                if len(unread) == NUM_BUFFERS:
                    wait([unread.popleft(), future], return_when=FIRST_COMPLETED)
                if future.cancelled():  # the tensors may change from now on
                    raise GlmError("the caller has cancelled it")
                if future.done():
                    return
                checksum = channel.fill(number % NUM_BUFFERS, bucket, tensors)
                is_last = number == len(buckets) - 1
                if is_last and next(tensors, None) is not None:  # it also runs a generator to its end
                    raise GlmError("there are more tensors than were announced")
                unread.append(client.call(lambda call_id, checksum=checksum: Bucket(call_id, ids[0], checksum)))
                channel.send(lambda: not future.done())
        except BaseException as error:  # noqa: BLE001 - whatever it was, the engine must not wait for more
            reason = reason_of(error)
            with suppress(GlmError):
                client.call(lambda call_id: Bucket(call_id, ids[0], error=reason))
        finally:
            wait([future])  # until then the engine may read
            if broadcaster is None or future.cancelled() or future.exception() is not None:
                channel.close()

    try:
        future = client.call(make)
    except BaseException:
        channel.close()
        raise
    in_background(send, "glm5-push")
    return future
