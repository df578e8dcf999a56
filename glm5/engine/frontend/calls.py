"""Calls that change the engine as a whole, for training loops: each is sent at once and answered by a future."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from glm5.common.errors import RequestError
from glm5.config.engine import MAX_KEY_AGE, Channel
from glm5.engine.frontend.client import Client
from glm5.engine.transport.wire import (
    PARTS,
    Part,
    PauseCall,
    Policy,
    ProfileCall,
    ResetCacheCall,
    ResumeCall,
    SleepCall,
    StatsCall,
    UpdateWeightsCall,
    WakeCall,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device

    from glm5.checkpoint.handover import Channel as PushChannel
    from glm5.checkpoint.handover import TensorStream

    Source = str | Path | Mapping[str, Tensor] | TensorStream

Called = Future[dict[str, Any]]


class Calls:
    """Calls that `LLM` waits for and `AsyncEngine` awaits. Each raises EngineDead at once if the engine has ended."""

    def __init__(self, client: Client):
        self.client = client
        self._broadcaster: tuple[PushChannel, Device] | None = None

    def pause(self) -> Called:
        return self.client.call(PauseCall)

    def resume(self) -> Called:
        return self.client.call(ResumeCall)

    def sleep(self, level: Literal[1, 2]) -> Called:
        if type(level) is not int or level not in (1, 2):
            raise RequestError(f"level is {level!r}; allowed: 1 or 2", param="level")
        return self.client.call(lambda call_id: SleepCall(call_id, level))

    def wake_up(self, tags: Sequence[str] | None) -> Called:
        if tags is not None and (
            not isinstance(tags, (list, tuple)) or not tags or any(tag not in PARTS for tag in tags)
        ):
            raise RequestError(f"tags are {tags!r:.60}; allowed: a list of {' and '.join(PARTS)}", param="tags")
        parts: tuple[Part, ...] = tuple(part for part in PARTS if tags is None or part in tags)
        return self.client.call(lambda call_id: WakeCall(call_id, parts))

    def reset_prefix_cache(self) -> Called:
        return self.client.call(ResetCacheCall)

    def stats(self) -> Called:
        return self.client.call(StatsCall)

    def profile(self, folder: str | None) -> Called:
        """Start a trace that is written to `folder`; None ends it."""
        return self.client.call(lambda call_id: ProfileCall(call_id, folder))

    def update_weights(
        self,
        source: Source,
        policy: Policy,
        version: int | None,
        max_key_age: int = 0,
        channel: Channel = "auto",
    ) -> Called:
        """Tensors are sent by another thread, which needs them until the future is done."""
        if policy not in (known := get_args(Policy)):
            raise RequestError(f"policy is {policy!r}; allowed: {', '.join(known)}", param="policy")
        if not (type(max_key_age) is int and 0 <= max_key_age <= MAX_KEY_AGE):
            raise RequestError(f"max_key_age is {max_key_age!r:.60}; allowed: 0 to {MAX_KEY_AGE}", param="max_key_age")
        if version is not None and not (type(version) is int and 0 <= version < 2**63):
            raise RequestError(f"version is {version!r:.60}; allowed: None, or 0 to 2**63 - 1", param="version")
        if channel not in get_args(Channel):
            raise RequestError(f"channel is {channel!r:.60}; allowed: auto, memory or collective", param="channel")
        self.client.check_alive()
        if isinstance(source, (str, Path)):
            folder = str(_folder(source))
            return self.client.call(lambda call_id: UpdateWeightsCall(call_id, folder, policy, version, max_key_age))
        from glm5.checkpoint.handover import TensorStream, stream_of  # imports torch
        from glm5.engine.frontend.push import push

        if not isinstance(source, (Mapping, TensorStream)):
            raise RequestError(f"source is {source!r:.60}; allowed: a folder, or tensors by name", param="source")
        stream = source if isinstance(source, TensorStream) else stream_of(source)
        pushed = push(self.client, stream, policy, version, max_key_age, self._broadcaster_for(stream, channel))
        pushed.add_done_callback(self._leave_failed)
        return pushed

    def _broadcaster_for(self, stream: TensorStream, channel: Channel) -> PushChannel | None:
        """What sends the tensors by a collective, if that is the channel."""
        device, info = stream.device, self.client.info
        own = None if device is None or device.type != "cuda" else device.index
        gpus = () if info.first_gpu is None else range(info.first_gpu, info.first_gpu + info.num_ranks)
        beyond = self.client.link.is_elsewhere
        if beyond and channel == "memory":
            raise RequestError(
                "channel is 'memory', and the engine is on another machine; allowed: auto or collective",
                param="channel",
            )
        is_own = own in gpus and not beyond
        if channel == "memory" or (channel == "auto" and not beyond and (own is None or not gpus or is_own)):
            return None
        if device is None or is_own or (own is None) != (not gpus):
            raise RequestError(
                f"the channel is a collective, and the tensors are on {device or 'several devices'}, the engine on "
                f"{f'GPUs {[*gpus]}' if gpus else 'CPUs'}; allowed: all on CPUs, or the tensors on a GPU of their own",
                param="channel",
            )
        from glm5.checkpoint.broadcaster import OwnChannels

        if self._broadcaster is None or self._broadcaster[1] != device:
            self.close()
            self._broadcaster = (
                (stream.channels or OwnChannels()).broadcaster(info.num_ranks, device, beyond=beyond),
                device,
            )
        return self._broadcaster[0]

    def _leave_failed(self, push: Called) -> None:
        """The next push needs another group; this one's sender closes it."""
        if push.cancelled() or push.exception() is not None:
            self._broadcaster = None

    def close(self) -> None:
        """Leave the group of the last pushes that were broadcast."""
        if self._broadcaster is not None:
            self._broadcaster[0].close()


def _folder(source: str | Path) -> Path:
    """The absolute path, since the engine's process may have another working folder."""
    try:
        str(source).encode()
    except UnicodeEncodeError:
        raise RequestError(f"source is {str(source)!r:.60}; allowed: a folder", param="source") from None
    return Path(os.path.expanduser(source)).absolute()  # expanduser keeps an unknown "~name"
