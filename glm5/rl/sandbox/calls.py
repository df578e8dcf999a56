"""The filter of system calls (calls.toml): what no program of a policy needs, and what would get around a box's limits.

Memory that belongs to no process (memfd, System V's shared memory, semaphores and messages) could not be counted. A
new user namespace could mount file systems of any size. The rest is refused because it reaches far into the kernel.
Formats: linux/seccomp.h, linux/bpf_common.h; numbers: asm/unistd.h.
"""

import errno
import struct
import tomllib
from functools import cache
from pathlib import Path

from glm5.common.errors import ConfigError

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # by machine, linux/audit.h
CLONE, PRLIMIT, PIVOT_ROOT = (56, 220), (302, 261), (155, 41)  # on x86_64 and aarch64
CLONE_NEWUSER = 0x10000000
X32 = 0x40000000  # the first number of x86_64's second set of calls

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF's operations
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


def column(machine: str) -> int:
    """Which of the two numbers is this machine's. Raises ConfigError for other machines."""
    if machine not in ARCHITECTURES:
        raise ConfigError(f"sandboxes know the system calls of {' and '.join(ARCHITECTURES)} only, this is {machine}")
    return list(ARCHITECTURES).index(machine)


@cache
def refused() -> dict[str, list[int]]:
    """By the name of a call its numbers on ARCHITECTURES."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["refused"]


def call_filter(machine: str) -> bytes:
    """The filter as an array of struct sock_filter. Raises ConfigError for a machine that it does not know."""
    mine = column(machine)
    code = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    for numbers in refused().values():
        code += [(EQUAL, 0, 1, numbers[mine]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    code += [(EQUAL, 0, 4, CLONE[mine]), (LOAD, 0, 0, ARGUMENT), (ANY_BIT, 0, 1, CLONE_NEWUSER)]
    code += [(RETURN, 0, 0, ERRNO | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    code += [(EQUAL, 0, 3, PRLIMIT[mine]), (LOAD, 0, 0, ARGUMENT), (EQUAL, 1, 0, 0)]  # of the caller itself: allowed
    code += [(RETURN, 0, 0, ERRNO | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
