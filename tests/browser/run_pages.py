"""The pages of `glm5 rl view`, served to a browser."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm5.rl.view.server import serving


@contextmanager
def run_pages(out: Path) -> Iterator[str]:
    """Serve on a thread while the block runs; gives the address."""
    with serving(out, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="rl-view")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
