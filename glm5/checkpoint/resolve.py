"""A path or a hub id -> a local directory. Downloads go through huggingface_hub, which resumes them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm5.common.errors import CheckpointError

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_id(path_or_id: str | Path) -> bool:
    """True for `org/name` when no such directory exists here."""
    return isinstance(path_or_id, str) and _HUB_ID.fullmatch(path_or_id) is not None and not Path(path_or_id).exists()


def resolve(path_or_id: str | Path) -> Path:
    """The local directory of a checkpoint; a hub id such as `zai-org/GLM-5-FP8` is downloaded first.

    Raises `CheckpointError` when there is no such directory or repository, access is refused, or the hub cannot be
    reached. An interrupted download resumes on the next call.
    """
    if is_hub_id(path_or_id):
        import huggingface_hub

        with hub_errors(str(path_or_id)):
            return Path(huggingface_hub.snapshot_download(str(path_or_id), allow_patterns=PATTERNS))
    path = Path(path_or_id).expanduser()
    try:
        is_file, is_dir = path.is_file(), path.is_dir()
    except OSError as error:
        raise CheckpointError(f"{str(path)[:200]}: cannot be read: {error.strerror}") from None
    if is_file:
        raise CheckpointError(f"{path} is a file; give the directory that holds config.json: {path.parent}")
    if not is_dir:
        raise CheckpointError(f"{path_or_id}: no such directory, and not a hub id of the form org/name")
    return path


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Turn errors of huggingface_hub inside the block into `CheckpointError`s that say what to do."""
    try:
        yield
    except Exception as error:
        if message := explain_hub_error(repo_id, error):
            raise CheckpointError(message) from error
        raise


def explain_hub_error(repo_id: str, error: Exception) -> str | None:
    """A message for the user, or None for an error that is not from the hub."""
    import httpx2
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo_id}"
    match error:
        case errors.GatedRepoError():
            return f"{repo_id} is gated: accept its conditions at {page}, then run: hf auth login"
        case errors.RepositoryNotFoundError():
            return (
                f"{repo_id}: no such directory here and no such model on the hub ({page}); "
                "check the spelling, or for a private model run: hf auth login"
            )
        case errors.NotASafetensorsRepoError():
            return f"{repo_id} holds no safetensors weights; only those are read"
        case errors.SafetensorsParsingError():
            return f"{repo_id}: a shard on the hub has a damaged header: {_first_line(error)}"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled() | httpx2.TransportError():
            return (
                f"{repo_id}: no such directory here, no complete download of that name, and the hub cannot be reached; "
                "connect, or give the path of a local copy"
            )
        case errors.EntryNotFoundError():
            return f"{repo_id} lacks a file that a checkpoint needs: {_first_line(error)}"
        case errors.HFValidationError() | errors.HfHubHTTPError():
            return f"{repo_id}: the hub answered: {_first_line(error)}; an interrupted download resumes when run again"
        case OSError():
            return f"{repo_id}: download failed: {_first_line(error)}; it resumes when run again"
        case _:
            return None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
