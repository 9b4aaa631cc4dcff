"""The file behind a host tier of KV blocks that is not to lie in RAM."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from octavo.errors import ConfigError


def swap_file(directory: Path, size: int) -> IO[bytes]:
    """A file of `size` bytes without a name: nothing is left behind, however the process ends.

    Its room on the disk is taken at once: a mapped file that finds the disk full later ends the process.

    Raises:
        ConfigError: the directory is missing or cannot be written to, or does not have the room.
    """
    try:
        free = shutil.disk_usage(directory).free
        if size > free:
            raise ConfigError(
                f"swap_space_bytes: a swap file of {size} bytes does not fit into {directory}, which has {free} bytes "
                "free; give less, or another swap_directory"
            )
        file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        raise ConfigError(
            f"swap_directory={str(directory)!r}: no swap file can be made there ({error.strerror}); name a directory "
            "that can be written to, or leave it out to swap to RAM"
        ) from error
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"swap_space_bytes: a swap file of {size} bytes cannot be had in {directory} ({error.strerror}); give "
            "less, or another swap_directory"
        ) from error
    return file
