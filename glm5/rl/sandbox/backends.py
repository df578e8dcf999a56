"""What a box is made of: bubblewrap, or the kernel's namespaces; or, unprotected, a folder of this machine.

Root becomes nobody first, so that a box has the same rights whoever starts it.
"""

import functools
import marshal
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from glm5.rl.sandbox.calls import PIVOT_ROOT, column
from glm5.rl.sandbox.namespaces import DEVICES, USER

NOBODY = 65534
WORK = "/box/work"
HARBOR = ("app", "logs", "solution", "tests")  # folders in WORK that terminal tasks know at the root
READ_ONLY = ("/etc/ld.so.cache", "/etc/alternatives")  # beside /usr and the interpreter's folder

# What a box's interpreter begins with: it receives the code, in which server.py is imported by its name.
BEGIN = """import marshal, os, sys  # a box of glm5.rl.sandbox
sys.modules["glm5.rl.sandbox.server"] = sys.modules["__main__"]
size, data = int.from_bytes(os.read(0, 8), "little"), b""
while len(data) < size: data += os.read(0, size - len(data)) or sys.exit()
for code in marshal.loads(data): exec(marshal.loads(code))
"""


@dataclass(frozen=True)
class Backend:
    """How boxes are made. `python`: the interpreter in them; `is_same_python`: it is the
    one that runs this. `bubblewrap`: the program's path, for boxes of its kind."""

    kind: Literal["bubblewrap", "namespaces", "unsafe-local"]
    python: str
    is_same_python: bool
    bubblewrap: str = ""

    @property
    def notice(self) -> str:
        """What was chosen, in one sentence for whoever starts a run."""
        if self.kind == "unsafe-local":
            return "programs of the policy run UNPROTECTED on this machine, with all rights of this user"
        maker = self.bubblewrap or "user namespaces"
        return f"programs of the policy run in boxes made by {maker}, without network and without the host's files"

    def start(self, link: int, errors: IO[bytes], disk_bytes: int) -> subprocess.Popen[bytes]:
        """Start a box's first process. `link`: its end of the link; `errors`: what it says where it fails."""
        argv = [self.python, "-I", "-S", "-c", BEGIN + ("enter()\nserve()" if self.kind == "namespaces" else "serve()")]
        if self.kind == "bubblewrap":
            argv = [*self._bubblewrap_argv(disk_bytes), *argv]
        as_nobody: dict[str, Any] = {}
        if self.kind == "bubblewrap" and os.geteuid() == 0:
            as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        return subprocess.Popen[bytes](
            argv,
            stdin=link,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={},
            cwd="/",
            start_new_session=True,
            **as_nobody,
        )

    def code(self) -> list[bytes]:
        """What a box's interpreter receives first."""
        names = ["server.py", "namespaces.py"] if self.kind == "namespaces" else ["server.py"]
        return [_code(name, self.is_same_python) for name in names]

    def environment(self, folder: str) -> dict[str, str]:
        """The variables that programs see. Hashes are fixed, so that a program's output can be had again; libraries
        start one thread, as a box may be allowed fewer processes than the machine has cores."""
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        path = f"{os.path.dirname(self.python)}:/usr/bin:/bin"
        return {"PATH": path, "HOME": folder, "LANG": "C.UTF-8", "TMPDIR": "/tmp", "PYTHONHASHSEED": "0", **threads}

    def jail(self, disk_bytes: int) -> dict[str, Any]:
        """What namespaces.py builds. `ids`: files of /proc/PID that make the box's user this one, of root nobody
        (user_namespaces(7))."""
        is_root = os.geteuid() == 0
        uid, gid = (NOBODY, NOBODY) if is_root else (os.geteuid(), os.getegid())
        setgroups = "allow" if is_root else "deny"
        return {
            "is_root": is_root,
            "ids": {"setgroups": setgroups, "uid_map": f"{USER} {uid} 1", "gid_map": f"{USER} {gid} 1"},
            "binds": self._binds(),
            "links": self._links(),
            "disk_bytes": disk_bytes,
            "pivot_root": PIVOT_ROOT[column(platform.machine())],
        }

    def _binds(self) -> list[str]:
        """Folders and files of the host that a box sees, read-only."""
        top = [path for path in ("/bin", "/sbin", "/lib", "/lib64") if os.path.isdir(path) and not os.path.islink(path)]
        prefix = str(Path(self.python).parents[1])
        own = [prefix] if not prefix.startswith("/usr") else []
        return ["/usr", *top, *own, *(path for path in READ_ONLY if os.path.exists(path))]

    def _links(self) -> list[tuple[str, str]]:
        """Symbolic links in a box: target, path."""
        top = [path for path in ("/bin", "/sbin", "/lib", "/lib64") if os.path.islink(path)]
        links = [(os.readlink(path), path) for path in top] + [("box/tmp", "/tmp"), ("../box/tmp", "/dev/shm")]
        links += [(f"{WORK[1:]}/{name}", f"/{name}") for name in HARBOR]
        links += [(f"/proc/self/fd/{fd}", f"/dev/{name}") for fd, name in enumerate(("stdin", "stdout", "stderr"))]
        return [*links, ("/proc/self/fd", "/dev/fd")]

    def _bubblewrap_argv(self, disk_bytes: int) -> list[str]:
        spaces = ["user", "pid", "net", "ipc", "uts", "cgroup-try"]
        argv = [self.bubblewrap, *(f"--unshare-{name}" for name in spaces), "--as-pid-1", "--cap-drop", "ALL"]
        argv += ["--uid", str(USER), "--gid", str(USER), "--hostname", "box"]
        for path in self._binds():
            argv += ["--ro-bind", path, path]
        for device in DEVICES:
            argv += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        for target, path in self._links():
            argv += ["--symlink", target, path]
        argv += ["--proc", "/proc", "--size", str(disk_bytes), "--tmpfs", "/box", "--remount-ro", "/"]
        return [*argv, "--chdir", "/", "--"]


@functools.cache
def _code(name: str, is_compiled: bool) -> bytes:
    """A file beside this one, for another interpreter: compiled where that is the same, which saves 5 ms."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return marshal.dumps(compile(text, name, "exec") if is_compiled else text)
