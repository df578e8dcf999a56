"""Builds a box from the kernel's namespaces, where bubblewrap is missing.

It runs in a bare interpreter, before `serve` of server.py. The first process unshares and
waits; its child is the first of the new process namespace, builds the file system and gives up all rights.
"""

import ctypes
import os

from glm5.rl.sandbox.server import LIBC, LINK, receive

TYPE_CHECKING = False  # see server.py
if TYPE_CHECKING:
    from typing import Any

USER = 1000  # who programs are, in the box
# CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWCGROUP
NAMESPACES = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000 | 0x2000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
READ_ONLY = 1 | 2 | 4  # MOUNT_ATTR_RDONLY, NOSUID, NODEV
ROOT = "/tmp"  # where the new root is built; only this mount namespace sees it
DEVICES = ("null", "zero", "full", "random", "urandom")


def enter() -> None:
    """Leave the host; what follows is in the box. Raises OSError where the kernel refuses."""
    jail: dict[str, Any] = receive()
    _unshare(jail["ids"])
    if jail["is_root"]:
        os.setgroups([])
    # Opened as the user who started this: the box's own may not be allowed to go there.
    sources = [(path, os.open(path, os.O_PATH)) for path in jail["binds"]]
    if pid := os.fork():
        os.close(LINK)
        os.waitpid(pid, 0)
        os._exit(0)
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    LIBC.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: after a change of user, /proc/self is root's
    _build(jail, sources)
    _call("sethostname", b"box", ctypes.c_size_t(3))
    control = LIBC.socket(2, 2, 0)
    _call("ioctl", control, ctypes.c_ulong(0x8914), b"lo".ljust(16, b"\0") + b"\1".ljust(24, b"\0"))  # lo up
    os.close(control)
    for _, fd in sources:
        os.close(fd)
    capability = 0
    while LIBC.prctl(24, ctypes.c_ulong(capability), 0, 0, 0) == 0:  # PR_CAPBSET_DROP
        capability += 1
    _call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def _unshare(ids: "dict[str, str]") -> None:
    """Into new namespaces. `ids`: what to write to files of /proc/PID, so that the box's user is one of the host."""
    own, (unshared, tell) = os.getpid(), os.pipe()
    if (helper := os.fork()) == 0:  # a process outside, as only such a one may map another user than its own
        try:
            os.close(LINK)
            os.close(tell)
            os.read(unshared, 1)
            for name, text in ids.items():
                with open(f"/proc/{own}/{name}", "w") as file:
                    file.write(text)
        finally:
            os._exit(0)
    _call("unshare", ctypes.c_int(NAMESPACES))
    os.write(tell, b"u")
    os.waitpid(helper, 0)
    os.close(unshared)
    os.close(tell)


def _build(jail: "dict[str, Any]", sources: list[tuple[str, int]]) -> None:
    """The file system: read-only parts of the host, a /proc and a /dev of its own, and one folder to write to."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, fd in sources:
        _bind(fd, ROOT + path)
        attributes = (ctypes.c_uint64 * 4)(READ_ONLY)
        _call("syscall", 442, -100, (ROOT + path).encode(), 0x8000, attributes, 32)  # mount_setattr, AT_RECURSIVE
    for device in DEVICES:
        _bind(os.open(f"/dev/{device}", os.O_PATH), f"{ROOT}/dev/{device}")
    for target, path in jail["links"]:
        os.makedirs(os.path.dirname(ROOT + path), exist_ok=True)
        os.symlink(target, ROOT + path)
    os.mkdir(ROOT + "/proc")
    _mount("proc", ROOT + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(ROOT + "/box")
    _mount("tmpfs", ROOT + "/box", "tmpfs", MS_NOSUID | MS_NODEV, f"size={jail['disk_bytes']},mode=755")
    os.chdir(ROOT)
    _call("syscall", jail["pivot_root"], b".", b".")
    _call("umount2", b".", 2)  # MNT_DETACH: the host's files
    os.chdir("/")
    _call("syscall", 442, -100, b"/", 0, (ctypes.c_uint64 * 4)(READ_ONLY), 32)


def _bind(fd: int, target: str) -> None:
    if os.path.isdir(f"/proc/self/fd/{fd}"):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(f"/proc/self/fd/{fd}", target, None, MS_BIND | MS_REC)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_bytes = kind.encode() if kind else None
    _call("mount", source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), options.encode(), what=target)


def _call(name: str, *arguments: "Any", what: str = "") -> None:
    if LIBC[name](*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}{what and ' '}{what}: {os.strerror(error)}")
