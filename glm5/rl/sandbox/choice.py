"""What boxes are made of, chosen once at the start by making one: bubblewrap, else user namespaces, else an error."""

import os
import shutil
import stat
import sys
from pathlib import Path

from glm5.common.errors import ConfigError
from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.sandbox import Sandbox, SandboxFailed

SYSTEM_PYTHON = "/usr/bin/python3"


def choose_backend(*, unsafe_local: bool = False) -> Backend:
    """The first that works here. `unsafe_local` accepts programs without a box where none does. Tell the user its
    `notice`. Raises ConfigError with the reason against each, and what to do."""
    reasons = [] if shutil.which("bwrap") else ["bubblewrap: there is no bwrap on the PATH"]
    for backend in candidates():
        reason = reason_against(backend)
        if not reason:
            return backend
        reasons.append(f"{backend.kind}: {reason}")
    if unsafe_local:
        return Backend("unsafe-local", _own_python(), is_same_python=True)
    raise ConfigError(
        f"no sandbox works here ({'; '.join(reasons)}): install bubblewrap, or allow user namespaces (Docker: "
        "--security-opt seccomp=unconfined --security-opt systempaths=unconfined; Ubuntu: sysctl -w "
        "kernel.apparmor_restrict_unprivileged_userns=0), or let programs of the policy run unprotected on this "
        "machine with --unsafe-local; environments that run no programs need none of this"
    )


def candidates() -> list[Backend]:
    """What may work here, the best first."""
    own = _own_python()
    # Root becomes nobody before bubblewrap looks for the interpreter, but after namespaces.py does.
    python = own if os.geteuid() != 0 or _others_may_run(own) else SYSTEM_PYTHON
    bubblewrap = shutil.which("bwrap")
    found = [Backend("bubblewrap", python, python == own, bubblewrap)] if bubblewrap else []
    return [*found, Backend("namespaces", own, is_same_python=True)]


def reason_against(backend: Backend) -> str:
    """Why no box can be made of it here, "" where one can: it is tried."""
    try:
        with Sandbox(backend) as box:
            done = box.run([backend.python, "-I", "-S", "-c", "print(6 * 7)"], timeout=30)
    except (SandboxFailed, ConfigError) as failed:
        return str(failed)
    return "" if done.stdout == b"42\n" else f"a program in it did not run: {done}"


def _own_python() -> str:
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


def _others_may_run(path: str) -> bool:
    file = Path(os.path.realpath(path))
    return all(part.exists() and part.stat().st_mode & stat.S_IXOTH for part in (file, *file.parents))
