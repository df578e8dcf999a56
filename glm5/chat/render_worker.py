"""Worker process that renders one untrusted template: `python -m glm5.chat.render_worker CPU_SECONDS`.

`glm5/chat/rendering.py` starts it and documents the protocol. It ends at a resource limit, or when its input ends.
"""

import os
import pickle
import resource
import signal
import sys
from typing import Any

from glm5.chat.rendering import FAILURE, LENGTH, TEXT, InProcessTemplate, TemplateFailure

_MAX_REASON = 1000
_MEMORY = 2 * 2**30  # bytes of address space: several times the largest request with its prompt


def main(cpu_seconds: int) -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    answers = os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    template: InProcessTemplate | None = None
    while head := sys.stdin.buffer.read(LENGTH.size):
        request = sys.stdin.buffer.read(LENGTH.unpack(head)[0])
        _allow(cpu_seconds)
        kind, text = TEXT, ""
        try:
            if template is None:
                template = InProcessTemplate(pickle.loads(request))
            else:
                text = template.render(_unpacked(request))
        except TemplateFailure as failure:
            kind, text = FAILURE, str(failure)[:_MAX_REASON]
        body = text.encode("utf-8", "surrogatepass")
        with os.fdopen(os.dup(answers), "wb") as answer:
            answer.write(kind + LENGTH.pack(len(body)) + body)


def _allow(cpu_seconds: int) -> None:
    """Limit the CPU time from now on; beyond it SIGXCPU ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _unpacked(request: bytes) -> dict[str, Any]:
    try:
        return pickle.loads(request)
    except MemoryError:
        raise TemplateFailure(f" is given {len(request)} bytes: more than fits into its {_MEMORY} of memory") from None


if __name__ == "__main__":
    main(int(sys.argv[1]))
