"""The first process of a box: it runs programs there, reads and writes files there, and kills all that programs leave.

It runs in a bare interpreter (`python -I -S -c`), so it imports little, and nothing of glm5. File descriptor 0 is the
link to the host. A request is its length (8 bytes) and marshal of (name, argument ...). An answer is six integers of 4
bytes (errno, exit code, ending, whether output was cut, lengths of two blobs), then the blobs.

Programs have this process's user id and cannot harm it: as the first of its process namespace it gets no signal from
them; it is not dumpable, so ptrace and /proc/1/mem are refused; and the filter of system calls (calls.py) keeps them
from changing its limits. Control groups are not used, as many machines have none that a user may change. Instead, this
process looks at memory and processes every 20 ms. Between two looks, hard limits hold: of memory for each process, of
open files, and of the disk, which is a tmpfs.
"""

import ctypes
import errno
import marshal
import os
import resource
import select
import stat
import time

TYPE_CHECKING = False  # typing itself takes 10 ms to import, a third of a box's start
if TYPE_CHECKING:
    from typing import Any, NoReturn

EXIT, TIME, MEMORY, PROCESSES, FILES = range(5)  # why a program ended
LINK = 0
LOOK_SECONDS = 0.02
SOCKET_BYTES = 2 * 212_992  # the most that the buffers of one socket hold, by the kernel's defaults
COUNTED = (b"RssAnon", b"RssShmem", b"VmSwap", b"VmPTE")  # of /proc/PID/status; pages of files belong to everybody
SIGKILL, CHUNK = 9, 1 << 16
LIBC = ctypes.CDLL(None, use_errno=True)
Answer = tuple[int, int, int, int, bytes, bytes]


def serve() -> "NoReturn":
    """Answer requests until the host closes the link."""
    settings: dict[str, Any] = receive()
    handlers = {"run": _run, "read": _read, "write": _write, "pack": _pack, "unpack": _unpack}
    if settings["is_contained"]:
        _check_isolation()
        os.mkdir("/box/tmp")
        os.mkdir(settings["folder"])
        settings["idle_sockets"] = _num_sockets()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where the host's memory runs out, boxes go first
        _lock(settings["filter"])
    _send(_answer())
    while True:
        name, *arguments = receive()
        try:
            answer = handlers[name](settings, *arguments)
        except OSError as error:
            answer = _answer(error.errno or errno.EIO, first=str(error).encode(errors="replace"))
        except Exception as error:  # noqa: BLE001  no file that a program left may end this process
            answer = _answer(errno.EIO, first=repr(error).encode(errors="replace"))
        _send(answer)


def receive() -> "Any":
    """The next request. Ends the process, and with it the box, when the host has gone."""
    return marshal.loads(_read_exactly(int.from_bytes(_read_exactly(8), "little")))


def _read_exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(LINK, min(size - len(data), 16 * CHUNK))
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


def _answer(
    error: int = 0, exit_code: int = 0, ending: int = EXIT, cut: int = 0, first: bytes = b"", second: bytes = b""
) -> Answer:
    return error, exit_code, ending, cut, first, second


def _send(answer: Answer) -> None:
    *numbers, first, second = answer
    head = b"".join(number.to_bytes(4, "little", signed=True) for number in (*numbers, len(first), len(second)))
    for part in (head, first, second):
        left = memoryview(part)
        while left:
            left = left[os.write(LINK, left) :]


def _check_isolation() -> None:
    with open("/proc/net/dev") as file:
        devices = [line.partition(":")[0].strip() for line in file.readlines()[2:]]
    if os.getpid() != 1 or devices != ["lo"]:
        raise OSError(f"it does not isolate: process {os.getpid()} instead of 1, network devices {devices}")


def _lock(program: bytes) -> None:
    """Give up, for this process and its children, what no program needs."""
    LIBC.signal(2, 1)  # SIGINT is ignored: Python has a handler, which programs could call
    code = ctypes.create_string_buffer(program, len(program))
    head = (ctypes.c_uint64 * 2)(len(program) // 8, ctypes.addressof(code))
    # PR_SET_NO_NEW_PRIVS; PR_SET_SECCOMP with a filter; PR_SET_DUMPABLE
    for arguments in ((38, 1, 0, 0, 0), (22, 2, ctypes.addressof(head), 0, 0), (4, 0, 0, 0, 0)):
        if LIBC.prctl(*map(ctypes.c_ulong, arguments)):
            raise OSError(ctypes.get_errno(), f"prctl{arguments[:2]}: {os.strerror(ctypes.get_errno())}")


def _run(settings: "dict[str, Any]", argv: list[str], stdin: bytes, timeout: float) -> Answer:
    return _Program(settings, argv, stdin).wait(timeout)


class _Program:
    """A running program: its standard input, and what was kept of its output."""

    def __init__(self, settings: "dict[str, Any]", argv: list[str], stdin: bytes) -> None:
        (in_end, self.feed), (out, out_end), (err, err_end) = os.pipe(), os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(settings, argv, (in_end, out_end, err_end))
        for fd in (in_end, out_end, err_end):
            os.close(fd)
        self.settings, self.stdin, self.cut = settings, memoryview(stdin), False
        self.kept = {out: bytearray(), err: bytearray()}
        self.ended = os.pidfd_open(self.pid)
        self.poller = select.poll()
        self.poller.register(LINK, 0)  # for POLLHUP: the host has gone
        self.fds = {self.feed: select.POLLOUT, out: select.POLLIN, err: select.POLLIN, self.ended: select.POLLIN}
        for fd, event in self.fds.items():
            os.set_blocking(fd, False)
            self.poller.register(fd, event)

    def wait(self, timeout: float) -> Answer:
        """Until it ends, or its time or room does. Nothing that it started outlives it."""
        status, ending = None, EXIT
        now = next_look = time.monotonic()
        deadline = now + timeout
        while status is None and ending == EXIT:
            for fd, _ in self.poller.poll(max(0, min(next_look, deadline) - now) * 1000):
                self._serve(fd)
            status = _reap(self.pid, os.WNOHANG)
            now = time.monotonic()
            if status is None and now >= deadline:
                ending = TIME
            elif status is None and now >= next_look:
                ending = _look(self.settings)
                next_look = time.monotonic() + LOOK_SECONDS
        killed = _kill_all(self.settings, self.pid)
        for fd in self.kept:
            while fd in self.fds and self._drain(fd):
                pass
        for fd in self.fds:
            os.close(fd)
        exit_code = os.waitstatus_to_exitcode(killed if status is None else status)
        return _answer(0, exit_code, ending, self.cut, *map(bytes, self.kept.values()))

    def _serve(self, fd: int) -> None:
        if fd == LINK:
            _kill_all(self.settings, self.pid)
            os._exit(0)
        if fd == self.feed:
            try:
                self.stdin = self.stdin[os.write(fd, self.stdin[:CHUNK]) :]
            except BrokenPipeError:
                self.stdin = self.stdin[:0]
            if not self.stdin:
                self._close(fd)
        elif fd in self.kept and not self._drain(fd):
            self._close(fd)

    def _close(self, fd: int) -> None:
        self.poller.unregister(fd)
        del self.fds[fd]
        os.close(fd)

    def _drain(self, fd: int) -> bool:
        """Read what is there, once; what is beyond the limit is not kept. False where nothing was."""
        try:
            piece = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        room = self.settings["output_bytes"] - len(self.kept[fd])
        self.kept[fd] += piece[:room]
        self.cut |= len(piece) > room
        return bool(piece)


def _become(settings: "dict[str, Any]", argv: list[str], ends: tuple[int, int, int]) -> "NoReturn":
    """In a new process: turn into the program, or say on its standard error why that cannot be."""
    code = 126
    try:
        os.setsid()
        for number, fd in enumerate(ends):
            os.dup2(fd, number)
        for number in (2, 13, 25):  # SIGINT, SIGPIPE, SIGXFSZ: Python had changed them
            LIBC.signal(number, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory_bytes"],) * 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (settings["open_files"],) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(settings["folder"])
        os.execvpe(argv[0], argv, settings["env"])
    except BaseException as error:  # noqa: BLE001  what argv holds is the policy's
        code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, f"{argv[0]}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _reap(pid: int, flags: int) -> int | None:
    """Bury the dead; with flags 0, once they are. The status of `pid`, if it is one of them."""
    status = None
    try:
        while (found := os.waitpid(-1, flags))[0]:
            if found[0] == pid:
                status = found[1]
    except ChildProcessError:
        pass
    return status


def _kill_all(settings: "dict[str, Any]", pid: int) -> int:
    """End every process of the box but this one; without a box, those of the program's group. The status of `pid`."""
    try:
        if settings["is_contained"]:
            os.kill(-1, SIGKILL)  # to all at once: none can fork in between
        else:
            os.killpg(pid, SIGKILL)
    except ProcessLookupError:
        pass
    return _reap(pid, 0) or 0


def _look(settings: "dict[str, Any]") -> int:
    """Which of its limits the box as a whole exceeds, EXIT for none."""
    if not settings["is_contained"]:
        return EXIT
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    if len(pids) > settings["processes"]:
        return PROCESSES
    tasks, memory = 0, max(0, _num_sockets() - settings["idle_sockets"]) * SOCKET_BYTES
    for pid in pids:
        try:
            with open(f"/proc/{pid}/status", "rb") as file:
                lines = file.read().split(b"\n")
        except OSError:
            continue  # it has ended
        for name, _, value in (line.partition(b":") for line in lines):
            if name in COUNTED:
                memory += int(value.split()[0]) * 1024
            elif name == b"Threads":
                tasks += int(value)
    disk = os.statvfs("/box")
    if tasks > settings["processes"]:
        return PROCESSES
    if memory > settings["memory_bytes"]:
        return MEMORY
    return FILES if disk.f_files - disk.f_ffree > settings["files"] else EXIT


def _num_sockets() -> int:
    with open("/proc/net/sockstat") as file:
        return int(file.readline().split()[2])


def _read(settings: "dict[str, Any]", path: str) -> Answer:
    fd = os.open(os.path.join(settings["folder"], path), os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check_inside(settings, fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > settings["disk_bytes"]:
            raise OSError(errno.EINVAL, f"no regular file of at most {settings['disk_bytes']} bytes")
        data = bytearray()
        while piece := os.read(fd, found.st_size + 1 - len(data)):
            data += piece
        return _answer(first=bytes(data))
    finally:
        os.close(fd)


def _write(settings: "dict[str, Any]", path: str, data: bytes) -> Answer:
    """Write a file, and the folders above it. A link in its place is not followed, nor one above it out of the box."""
    folder, name = os.path.split(os.path.join(settings["folder"], path))
    os.makedirs(folder, exist_ok=True)
    above = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        _check_inside(settings, above)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(name, flags, 0o644, dir_fd=above), "wb") as file:
            file.write(data)
    finally:
        os.close(above)
    return _answer()


def _check_inside(settings: "dict[str, Any]", fd: int) -> None:
    """Where an open file really is: links led there."""
    place = os.readlink(f"/proc/self/fd/{fd}")
    if place != settings["folder"] and not place.startswith(settings["folder"] + "/"):
        raise OSError(errno.EPERM, f"a link leads out of the folder, to {place}")


def _pack(settings: "dict[str, Any]") -> Answer:
    """All of the folder, as `unpack` takes it: for each entry its path, permissions, and a file's content, a link's
    target, or nothing for a folder. Pipes, sockets and devices are left out."""
    entries, room, root = [], settings["disk_bytes"], settings["folder"]
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            found = os.lstat(path)
            content = os.readlink(path) if stat.S_ISLNK(found.st_mode) else None
            if stat.S_ISREG(found.st_mode):
                room -= found.st_size  # which may be far more than it occupies
                if room < 0:
                    raise OSError(errno.EFBIG, f"its files are longer than {settings['disk_bytes']} bytes")
                with open(path, "rb") as file:
                    content = file.read()
            elif content is None and not stat.S_ISDIR(found.st_mode):
                continue
            entries.append((os.path.relpath(path, root), stat.S_IMODE(found.st_mode), content))
    return _answer(first=marshal.dumps(entries, 2))


def _unpack(settings: "dict[str, Any]", packed: bytes) -> Answer:
    entries = marshal.loads(packed)
    for name, _, content in entries:
        path = os.path.join(settings["folder"], name)
        if content is None:
            os.mkdir(path)
        elif isinstance(content, str):
            os.symlink(content, path)
        else:
            with open(path, "xb") as file:
                file.write(content)
    for name, mode, content in reversed(entries):  # the permissions of a folder after what is in it
        if not isinstance(content, str):
            os.chmod(os.path.join(settings["folder"], name), mode)
    return _answer()
