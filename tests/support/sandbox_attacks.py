"""Programs that try to get out of a box, or to use more than it may, and what must become of each.

    python -m tests.support.sandbox_attacks KIND     JSON: for each attack "" or what went wrong

Only the standard library, so that it runs as another user, by another interpreter.
"""

import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.choice import candidates
from glm5.rl.sandbox.sandbox import Completed, Limits, Sandbox

SMALL = Limits(memory_mb=200, disk_mb=8, processes=32, files=2_000, open_files=128, output_bytes=10_000)
SECRET = "the-secret-of-the-host"

# In front of every program. `tried(f, ...)` prints BREACH where f works, else the error.
PRELUDE = """
import ctypes, errno, mmap, os, signal, socket, struct, sys, threading, time
LIBC = ctypes.CDLL(None, use_errno=True)
HOST = {host}
def tried(what, f, *arguments):
    try:
        found = f(*arguments)
        print("BREACH" if found not in (None, b"", "", [], -1) else "refused", what, repr(found)[:200])
    except OSError as error:
        print("refused", what, error)
def call(name, *arguments):
    done = LIBC[name](*arguments)
    print("BREACH" if done >= 0 else "refused", name, arguments[0], os.strerror(ctypes.get_errno()))
def read(path):
    with open(path, "rb") as file:
        return file.read(4096)
def write(path, flags=0):
    return str(os.open(path, os.O_WRONLY | flags))
X86 = os.uname().machine == "x86_64"
def number(x86, arm):
    return x86 if X86 else arm
"""


@dataclass(frozen=True)
class Attack:
    """`ended_by` and `says` (a pattern in what it prints) show that it was tried, and stopped by the right thing.
    `also`: a further check of the box, "" where all is well."""

    name: str
    program: str
    says: str = ""
    ended_by: str = "exit"
    timeout: float = 20.0
    also: Callable[[Sandbox, Completed], str] = field(default=lambda box, done: "")


def _files_are_bounded(box: Sandbox, done: Completed) -> str:
    for name, use in (("read", lambda: box.read("sparse")), ("fresh_copy", box.fresh_copy)):
        try:
            use()
            return f"{name} of a file of 1 TB worked"
        except OSError:
            continue
    return ""


def _links_lead_nowhere(box: Sandbox, done: Completed) -> str:
    for path in ("file", "folder/secret", "up/box/other", "process", "pipe", "link"):
        try:
            return f"read {path}: {box.read(path)!r}"
        except OSError:
            continue
    for path in ("file", "folder/new", "up/new", "pipe"):
        try:
            box.write(path, b"broken into")
            return f"wrote {path}"
        except OSError:
            continue
    return ""


def _output_is_bounded(box: Sandbox, done: Completed) -> str:
    size = len(done.stdout), len(done.stderr)
    return "" if done.output_truncated and max(size) <= SMALL.output_bytes else f"kept {size} bytes"


def _box_still_answers(box: Sandbox, done: Completed) -> str:
    again = box.run(["/bin/echo", "here"])
    return "" if again.stdout == b"here\n" and again.ended_by == "exit" else f"afterwards: {again}"


ATTACKS = (
    Attack(
        "fork bomb",
        """
while True:
    try: os.fork()
    except OSError: pass
""",
        ended_by="processes",
        also=_box_still_answers,
    ),
    Attack(
        "threads",
        """
threading.stack_size(65536)
while True: threading.Thread(target=time.sleep, args=(60,)).start()
""",
        ended_by="processes",
    ),
    Attack("memory at once", "bytearray(1 << 30)", says="MemoryError"),
    Attack(
        "memory of many processes",
        """
for _ in range(8):
    if os.fork() == 0: break
x = bytearray(60_000_000)
time.sleep(60)
""",
        ended_by="memory",
    ),
    Attack(
        "shared mapping",
        """
m = mmap.mmap(-1, 1 << 30)
for at in range(0, 1 << 30, 4096): m[at] = 1
time.sleep(60)
""",
        ended_by="memory",
    ),
    Attack(
        "memory of no process",
        """
call('shmget', 0, 1 << 24, 0o1600)
call('msgget', 0, 0o1600)
call('semget', 0, 9, 0o1600)
call('syscall', number(319, 279), b'x', 0)  # memfd_create
call('syscall', 447, 0)  # memfd_secret
""",
        says="refused syscall 447",
    ),
    Attack(
        "socket buffers",
        """
for _ in range(10):
    if os.fork() == 0: break
kept = []
while len(kept) < 50:
    kept.append(socket.socketpair())
    for end in kept[-1]:
        end.setblocking(False)
        try:
            while True: end.send(bytes(65536))
        except BlockingIOError: pass
time.sleep(60)
""",
        ended_by="memory",
    ),
    Attack(
        "full disk",
        """
total = 0
for place in ('.', '/tmp', '/dev/shm'):
    try:
        file = open(place + '/f', 'wb', buffering=0)
        while True: total += file.write(bytes(1 << 20))
    except OSError as error: print(error)
print('BREACH' if total > 8_000_000 + mmap.PAGESIZE else 'held', total)
""",
        says="(?s)No space left.*held",
        also=_box_still_answers,
    ),
    Attack(
        "many small files",
        "for i in range(10**7): os.close(os.open(str(i), os.O_CREAT))",
        ended_by="files",
    ),
    Attack(
        "sparse file",
        "open('sparse', 'wb').truncate(1 << 40); print('made')",
        says="made",
        also=_files_are_bounded,
    ),
    Attack(
        "open files",
        """
kept = []
try:
    while True: kept.append(open('/dev/null'))
except OSError as error: print(error)
print('BREACH' if len(kept) > 128 else 'held')
""",
        says="(?s)Too many open files.*held",
    ),
    Attack(
        "loop that ignores signals",
        """
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
        ended_by="time-out",
        timeout=0.3,
    ),
    Attack(
        "endless output",
        """
while True:
    os.write(1, bytes(65536))
    os.write(2, bytes(65536))
""",
        ended_by="time-out",
        timeout=0.3,
        also=_output_is_bounded,
    ),
    Attack(
        "network",
        """
for address in (('1.1.1.1', 53), ('127.0.0.1', HOST['port'])):
    tried(address, lambda: socket.create_connection(address, 3).getpeername())
tried('udp', lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53)))
""",
        says="(?s)unreachable.*refused udp",
    ),
    Attack(
        "abstract socket of the host",
        """
s = socket.socket(socket.AF_UNIX)
tried('abstract', lambda: s.connect('\\0' + HOST['name']) or 'connected')
""",
        says="refused abstract",
    ),
    Attack(
        "files of the host",
        """
folder = os.path.dirname(HOST['file'])
for path in (HOST['file'], '/etc/shadow', '/etc/passwd', '/etc/hostname'): tried(path, read, path)
for path in (folder, '/home', '/sys', '/var', '/run', '/mnt', '/opt', '/boot'): tried(path, os.listdir, path)
print('more', set(os.listdir('/')) - HOST['top'])
""",
        says=r"more set\(\)",
    ),
    Attack(
        "writes outside",
        """
for folder in ('', '/usr', '/usr/bin', '/etc', '/dev', '/proc'): tried(folder, write, folder + '/new', os.O_CREAT)
for path in ('/usr/bin/env', '/etc/ld.so.cache', '/proc/sysrq-trigger', '/proc/sys/user/max_user_namespaces',
             '/proc/sys/kernel/core_pattern'): tried(path, write, path)
""",
        says="refused /proc/sys/kernel/core_pattern",
    ),
    Attack(
        "surviving children",
        """
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        for n in (1, 2, 13, 15): signal.signal(n, signal.SIG_IGN)
        if os.fork() == 0: time.sleep(60)
        os._exit(0)
print('left')
""",
        says="left",
        also=_box_still_answers,
    ),
    Attack(
        "/proc",
        """
pids = {name for name in os.listdir('/proc') if name.isdigit()}
print('BREACH' if pids != {'1', str(os.getpid())} else 'refused', 'pids', pids)
for name in ('mem', 'environ', 'auxv'): tried(name, read, '/proc/1/' + name)
for name in ('fd', 'root/usr', 'cwd'): tried(name, os.listdir, '/proc/1/' + name)
for name in ('mem', 'oom_score_adj', 'uid_map'): tried(name, write, '/proc/1/' + name)
tried('kcore', read, '/proc/kcore')
""",
        says="(?s)refused pids.*refused kcore",
    ),
    Attack(
        "links",
        """
folder = os.path.dirname(HOST['file'])
for target, name in ((HOST['file'], 'file'), (folder, 'folder'), ('../../..', 'up'), ('/proc/self/environ', 'process'),
                     ('link', 'link')): os.symlink(target, name)
os.mkfifo('pipe')
tried('file', read, 'file')
""",
        says="refused file",
        also=_links_lead_nowhere,
    ),
    Attack(
        "terminal injection",
        """
import fcntl
for path in ('/dev/tty', '/dev/console', '/dev/ptmx', '/dev/tty1'): tried(path, write, path)
for fd in range(3): tried('TIOCSTI', lambda: str(fcntl.ioctl(fd, 0x5412, b'x')))
print('BREACH' if os.getsid(0) != os.getpid() else 'refused', 'session')
""",
        says="(?s)refused TIOCSTI.*refused session",
    ),
    Attack(
        "attacks on the first process",
        """
for n in range(1, 65):
    try: os.kill(1, n)
    except OSError: pass
call('ptrace', 16, 1, 0, 0)  # attach
call('ptrace', 0x4206, 1, 0, 0)  # seize
call('prlimit', 1, 7, struct.pack('QQ', 0, 0), None)
call('syscall', 438, os.pidfd_open(1), 0, 0)  # pidfd_getfd
room = ctypes.create_string_buffer(8)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(room), 8)
call('process_vm_readv', 1, vector, 1, vector, 1, 0)
""",
        says="refused process_vm_readv",
        also=_box_still_answers,
    ),
    Attack("kill everything", "os.kill(-1, 9)", also=_box_still_answers),
    Attack(
        "new namespaces",
        """
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000):  # user, mount, process, network
    call('unshare', flag)
    pid = LIBC.syscall(number(56, 220), flag | 17, 0, 0, 0, 0)  # clone
    if pid == 0: os._exit(0)
    print('BREACH' if pid > 0 else 'refused', 'clone', hex(flag))
call('syscall', 435, bytes(88), 88)  # clone3
call('setns', os.open('/proc/self/ns/net', 0), 0)
call('mount', b'none', b'/tmp', b'tmpfs', 0, None)
tried('chroot', lambda: os.chroot('/') or 'done')
""",
        says="refused chroot",
    ),
    Attack(
        "rights",
        """
import shutil, subprocess
tried('setuid', lambda: os.setuid(0) or 'done')
tried('mknod', lambda: os.mknod('disk', 0o60666, os.makedev(8, 0)) or 'done')
shutil.copy('/bin/sh', 'sh')
os.chmod('sh', 0o6755)
who = subprocess.run(['./sh', '-p', '-c', 'id -u'], capture_output=True).stdout
print('refused' if who == b'1000\\n' else 'BREACH', 'setuid program', who)
status = open('/proc/self/status').read()
none = all(f'Cap{name}:\\t' + 16 * '0' in status for name in ('Inh', 'Prm', 'Eff', 'Bnd', 'Amb'))
print('refused' if none and 'NoNewPrivs:\\t1' in status else 'BREACH', 'capabilities', status)
""",
        says="(?s)refused setuid program.*refused capabilities",
    ),
    Attack(
        "keys and far corners of the kernel",
        """
call('syscall', number(248, 217), b'user', b'k', b'x', 1, -4)  # add_key
call('syscall', number(250, 219), 0, -4, 0)  # keyctl
call('syscall', number(321, 280), 0, bytes(128), 128)  # bpf
call('syscall', number(298, 241), bytes(128), 0, -1, -1, 0)  # perf_event_open
call('syscall', number(323, 282), 0)  # userfaultfd
if X86: call('syscall', 0x40000000 + 39)  # getpid of x32
call('syscall', 425, 8, bytes(120))  # io_uring_setup
""",
        says="refused syscall 425",
    ),
    Attack(
        "environment of the host",
        """
found = [str(os.environ).encode(), read('/proc/self/environ')]
print('BREACH' if any(HOST['secret'].encode() in text for text in found) else 'refused')
""",
        says="refused",
    ),
)


def try_all(backend: Backend, names: Collection[str] = ()) -> dict[str, str]:
    """For each attack, or those of these names, "" or what went wrong."""
    os.environ["SANDBOX_SECRET"] = SECRET
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        secret = Path(folder, "secret")
        secret.write_text(SECRET)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        name = f"glm5-sandbox-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        top = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "dev", "proc", "box", "tmp"}
        top |= {"app", "logs", "solution", "tests"}  # links into the box's own folder
        top.add(Path(backend.python).parts[1])
        host = {"port": server.getsockname()[1], "name": name, "file": str(secret), "secret": SECRET, "top": top}
        found = {attack.name: try_one(backend, attack, host) for attack in ATTACKS if attack.name in names or not names}
        assert secret.read_text() == SECRET
        assert os.listdir(folder) == ["secret"]
        return found


def try_one(backend: Backend, attack: Attack, host: dict[str, object]) -> str:
    program = PRELUDE.replace("{host}", repr(host)) + attack.program
    mark = f"{attack.name} {time.time_ns()}"
    with Sandbox(backend, SMALL) as box:
        done = box.run([backend.python, "-I", "-S", "-c", program, mark], attack.timeout)
        left = [pid for pid in os.listdir("/proc") if pid.isdigit() and mark.encode() in _command_line(pid)]
        said = (done.stdout + done.stderr).decode(errors="replace")
        if left or "BREACH" in said or done.ended_by != attack.ended_by or not re.search(attack.says, said):
            return f"ended by {done.ended_by} ({done.exit_code}), left {left}, said: {said[-1500:]}"
        return attack.also(box, done)


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    print(json.dumps(try_all(next(backend for backend in candidates() if backend.kind == sys.argv[1]))))
