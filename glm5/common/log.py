"""Logging set-up, called by the command line only. Libraries never configure logging."""

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(level: str = "info") -> None:
    """Send glm5's log lines of `level` and above to standard error; other libraries keep their own ways."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    logger = logging.getLogger("glm5")  # not the root: huggingface_hub's own lines would come out twice
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
