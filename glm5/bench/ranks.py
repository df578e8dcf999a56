"""A benchmark that runs as one process a GPU."""

import subprocess
import sys
from collections.abc import Sequence

from glm5.parallel.rendezvous import Rendezvous


def run_ranks(module: str, ranks: int, arguments: Sequence[str]) -> int:
    """`python -m MODULE ARGUMENTS --ranks N --rank R --port P`, once for each rank; the largest of their exit codes."""
    rendezvous = Rendezvous()
    store = rendezvous.open(ranks)
    command = [sys.executable, "-m", module, *arguments, "--ranks", str(ranks), "--port", str(rendezvous.port)]
    processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(ranks)]
    codes = [process.wait() for process in processes]
    del store
    return max(map(abs, codes))
