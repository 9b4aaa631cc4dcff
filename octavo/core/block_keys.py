"""What a full block of keys and values is known by: a hash of all tokens up to its end.

    root ── key 0 ── key 1 ── key 2        root:   salt, adapter
             │        │        │           key i:  key i - 1, the tokens of block i
          [t0-15]  [t16-31] [t32-47]

Equal keys mean equal tokens at equal positions under one salt and adapter, and so equal keys and values. SHA-256 over a
fixed encoding: the same in every process and on every machine, and no prompt can be made that collides with another.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def root_key(salt: str | None, adapter: str | None = None) -> bytes:
    """Where the chain begins. Different salts, or adapters, never share a block."""
    parts = (b"" if part is None else b"=" + part.encode("utf-8", "surrogatepass") for part in (salt, adapter))
    return hashlib.sha256(b"".join(struct.pack("<q", len(part)) + part for part in parts)).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block of `tokens` that follows what `parent` stands for; ids are below 2**32."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()
