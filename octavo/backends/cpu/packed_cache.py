"""Packed weights on disk: a later start maps the file that an earlier one wrote, and processes share its memory.

    KEY.packed    4096 bytes   "octavo packed weights", the key, the size, zeros, and the checksum of what follows
                  size bytes   the program's packed weights, one after the other

The key is a digest of all that the bytes follow from: the model's files as they were before they were opened, what is
made of which tensor, the kernel table, and the way in which this build packs (`octavo._native.packing`). So a file is
never changed, only replaced as a whole by one that says the same; and what is not as it was written is not used.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from octavo.backends.cpu.native import Program, packing
from octavo.backends.cpu.packing import PackingJob
from octavo.errors import ConfigError
from octavo.metrics import log_event
from octavo.weights import FileIdentity

HEADER = 4096  # bytes; weights begin with a page
_MAGIC = b"octavo packed weights\n"
_WRITTEN_AT_ONCE = 64 << 20  # bytes: so that Linux can keep the file in pages of 2 MiB, and map it in such
_ABANDONED = 24 * 3600  # seconds after which a file that a killed process left half written is removed


class PackedCache:
    """A directory of packed weights, as it concerns one model."""

    def __init__(self, directory: Path, sources: Sequence[FileIdentity]) -> None:
        """
        Args:
            sources: of the files that the weights are read from, as they were before they were opened.

        Raises:
            ConfigError: there is no such directory, and it cannot be made.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"packed_cache={str(directory)!r}: no directory, and none can be made there ({error.strerror}); name "
                "another, or leave it out"
            ) from error
        self._directory = directory
        self._sources = tuple(sources)

    def fill(
        self, program: Program, jobs: Sequence[PackingJob], quantization: str | None, pack: Callable[[], None]
    ) -> str:
        """Maps the program's weights from the cache, or packs them and writes them there.

        A file that cannot be used, and a disk that takes none, are warnings in the log: the weights are packed.

        Returns:
            "hit", "written", or "not written" and why.
        """
        key = _key(self._sources, jobs, quantization, program.isa)
        path = self._directory / f"{key}.packed"
        reason = _map(program, path, key)
        if reason is None:
            return "hit"
        if reason:
            log_event("packed_cache_refused", {"file": path, "reason": reason}, logging.WARNING)
        pack()
        try:
            self._write(program, jobs, path, key)
        except OSError as error:
            log_event("packed_cache_not_written", {"file": path, "reason": error.strerror}, logging.WARNING)
            return f"not written: {error.strerror}"
        return "written"

    def _write(self, program: Program, jobs: Sequence[PackingJob], path: Path, key: str) -> None:
        """Under a name of its own, and only when all of it is on the disk under its proper one."""
        for abandoned in self._directory.glob("*.tmp"):
            with suppress(FileNotFoundError):  # another process is as tidy
                if time.time() - abandoned.stat().st_mtime > _ABANDONED:
                    abandoned.unlink()
        temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb", buffering=_WRITTEN_AT_ONCE) as file:
                os.posix_fallocate(file.fileno(), 0, HEADER + program.packed_bytes)
                file.write(_header(key, program.packed_bytes) + program.packed_checksum().to_bytes(8, "little"))
                for weight in sorted({job.weight for job in jobs}):
                    file.write(program.packed(weight))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)  # the name, too
        finally:
            os.close(directory)


def _map(program: Program, path: Path, key: str) -> str | None:
    """None when that is done; else why not, which is "" where there is no such file."""
    try:
        with path.open("rb") as file:
            size, expected = os.fstat(file.fileno()).st_size, HEADER + program.packed_bytes
            if size != expected:
                return f"it has {size} bytes, not {expected}"
            header = file.read(HEADER)
            if header[:-8] != _header(key, program.packed_bytes):
                return "its header is damaged, or another's"
            if not program.map_weights(file.fileno(), HEADER, int.from_bytes(header[-8:], "little")):
                return "its checksum says that it is damaged"
            return None
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    except MemoryError:
        return "it does not fit into the address space"


def _header(key: str, size: int) -> bytes:
    """All of it but the checksum."""
    return (_MAGIC + key.encode() + b"\n" + size.to_bytes(8, "little")).ljust(HEADER - 8, b"\0")


def _key(sources: Sequence[FileIdentity], jobs: Sequence[PackingJob], quantization: str | None, isa: str) -> str:
    digest = blake2b(digest_size=16)
    for part in (packing(), isa, quantization, *(tuple(source) for source in sources)):
        digest.update(f"{part!r}\n".encode())
    for job in jobs:
        tensor = job.tensor
        where = (job.weight, job.first_panel, job.panel_step)
        what = (tensor.name, tensor.shape, tensor.dtype, tensor.interleaved_heads, tensor.place)
        digest.update(f"{where} {what}\n".encode())
    return digest.hexdigest()
