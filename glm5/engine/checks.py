"""Checks before a model is loaded: missing GPUs and adapters, folders that cannot be written."""

from pathlib import Path

from glm5.common.errors import ConfigError
from glm5.common.writable import try_to_write

_SOME_BYTES = 2**20  # an empty file can be written to a full disk


def check_disk(folder: str | None) -> None:
    """Create the folder for pages. Raises ConfigError if nothing can be written there."""
    if folder is None:
        return
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        try_to_write(Path(folder), _SOME_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        why = "it is a file" if isinstance(error, FileExistsError) else getattr(error, "strerror", None) or error
        raise ConfigError(
            f"kv_disk_dir: got {folder!r}, where nothing can be written ({why}); allowed: a folder with room, or none"
        ) from None


def check_adapter(folder: str | None) -> None:
    """Raises ConfigError if there is no adapter in the folder; what it holds is checked once the model is known."""
    if folder is not None and not Path(folder, "adapter_config.json").is_file():
        raise ConfigError(f"adapter: got {folder!r}; allowed: a folder with adapter_config.json, as PEFT writes it")


def check_gpus(device: str, ranks: int) -> None:
    """Raises ConfigError if the engine needs more GPUs than this machine has. torch is imported only if some may be
    missing: with one rank, "auto" needs none."""
    if not device.startswith("cuda") and (device != "auto" or ranks == 1):
        return
    import torch

    count = torch.cuda.device_count()
    name, colon, index = device.partition(":")
    if colon and ranks > 1:
        raise ConfigError(
            f"device: got {device}, which is one GPU, and tensor_parallel_size {ranks} needs {ranks}; allowed: cuda"
        )
    if name == "cuda" and not count:
        needed = f"tensor_parallel_size {ranks} needs {ranks} GPUs, and " if ranks > 1 else ""
        raise ConfigError(
            f"device: got {device}; {needed}torch finds no GPU here{_why_none()}; allowed here: auto, cpu"
        )
    if colon and int(index) >= count:
        allowed = f"auto, cpu, cuda, or cuda:0 to cuda:{count - 1}"
        raise ConfigError(f"device: got {device}; torch finds {count} of them here; allowed here: {allowed}")
    if count and ranks > count:
        raise ConfigError(
            f"tensor_parallel_size: got {ranks}, which needs {ranks} GPUs, and torch finds {count} here; allowed here: "
            f"up to {count}, or more with device cpu"
        )


def _why_none() -> str:
    """torch's reason, such as a missing driver."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason, _, _ = str(error).partition("\n")
        return f" ({reason.rstrip('.')})"
    return ""
