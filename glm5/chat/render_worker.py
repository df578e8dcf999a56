"""Renders one template for a process that it cannot harm: `python -m glm5.chat.render_worker CPU_SECONDS`.

`glm5/chat/rendering.py` starts it and says how they talk. Its end, by a limit or by the end of its input, harms nobody.
"""

import os
import pickle
import resource
import signal
import sys
from typing import Any

from glm5.chat.rendering import FAILURE, LENGTH, TEXT, Here, TemplateFailure

_MAX_REASON = 1000
_MEMORY = 2 * 2**30  # bytes of addresses: of the largest request, with its prompt, a few times over


def main(cpu_seconds: int) -> None:
    """Serve orders until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    answers = os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    template: Here | None = None
    while head := sys.stdin.buffer.read(LENGTH.size):
        order = sys.stdin.buffer.read(LENGTH.unpack(head)[0])
        _allow(cpu_seconds)
        kind, text = TEXT, ""
        try:
            if template is None:
                template = Here(pickle.loads(order))
            else:
                text = template.render(_unpacked(order))
        except TemplateFailure as failure:
            kind, text = FAILURE, str(failure)[:_MAX_REASON]
        body = text.encode("utf-8", "surrogatepass")
        with os.fdopen(os.dup(answers), "wb") as answer:
            answer.write(kind + LENGTH.pack(len(body)) + body)


def _allow(cpu_seconds: int) -> None:
    """So much processor time from now on, before SIGXCPU ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _unpacked(order: bytes) -> dict[str, Any]:
    try:
        return pickle.loads(order)
    except MemoryError:
        raise TemplateFailure(f" is given {len(order)} bytes: more than fits into its {_MEMORY} of memory") from None


if __name__ == "__main__":
    main(int(sys.argv[1]))
