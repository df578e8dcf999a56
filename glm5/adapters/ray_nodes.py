"""Processes on the nodes of a Ray cluster: an actor for each, which hosts one process to its end.

    with RayNodes("auto") as nodes:
        run(recipe, launcher=nodes.launch)

Ray chooses the node and its GPU and keeps them for the process; all else is carried by one TCP connection between the
process and its stand-in here (common/elsewhere.py). If a node is lost, its processes end as if they had been killed.
"""

import json
import os
import secrets
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from glm5.common.errors import ConfigError
from glm5.common.extras import require

PLACE_SECONDS = 120.0


class Hosting:
    """The actor: it listens, then serves a stand-in, and ends with the process."""

    def listen(self, key: bytes) -> tuple[str, int]:
        """Where the stand-in finds it."""
        from glm5.common.elsewhere import Host

        address = require("ray", "ray").util.get_node_ip_address()
        self._host = Host(address, key)
        return self._host.address

    def serve(self) -> None:
        self._host.serve()
        require("ray", "ray").actor.exit_actor()  # so that its node and GPU are free again


class RayNodes:
    """The cluster at `address`, as of `ray.init`. Raises ConfigError where there is none."""

    def __init__(self, address: str) -> None:
        self._ray: Any = require("ray", "ray")
        self._folder = tempfile.TemporaryDirectory(prefix="glm5-ray-")
        try:
            self._ray.init(address, log_to_driver=False, ignore_reinit_error=True)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"ray: no cluster at {address!r} ({error}); start one with  ray start --head") from None
        self._actors: list[Any] = []

    def launch(self, device: str) -> list[str]:
        """The command in place of Python for a process that computes on `device`. Raises ConfigError where no node has
        room for it within PLACE_SECONDS."""
        needs = {"num_cpus": 1, "num_gpus": int(device.startswith("cuda")), "max_restarts": 0}
        actor = self._ray.remote(Hosting).options(scheduling_strategy="SPREAD", **needs).remote()
        key = secrets.token_bytes(32)
        try:
            host, port = self._ray.get(actor.listen.remote(key), timeout=PLACE_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            self._ray.kill(actor)
            raise ConfigError(
                f"ray: no node has a free CPU{' and GPU' if needs['num_gpus'] else ''} for another process; left are "
                f"{self._ray.available_resources()}; start more nodes or fewer processes"
            ) from None
        actor.serve.remote()
        self._actors.append(actor)
        file = Path(self._folder.name) / secrets.token_hex(8)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as handle:
            json.dump({"host": host, "port": port, "key": key.hex()}, handle)
        return [sys.executable, "-m", "glm5.common.elsewhere", str(file)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.shutdown()
        self._folder.cleanup()
