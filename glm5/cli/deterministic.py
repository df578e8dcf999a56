"""What deterministic commands set before torch is imported."""

import os


def prepare_deterministic(*, wanted: bool) -> None:
    """Let cuBLAS be deterministic if `wanted`: torch requires it for deterministic matrix products on a GPU."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
