"""A file that knows the checksum of what was written to it."""

from __future__ import annotations

import hashlib
from typing import IO, Any


class HashedFile:
    """Passes bytes on to a file and keeps their SHA-256, so they need not be read again."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        """Write one contiguous block of bytes; returns how many."""
        self._digest.update(data)
        written = self._handle.write(data)
        self.size += written
        return written

    def hexdigest(self) -> str:
        """SHA-256 of everything written so far, as 64 hexadecimal digits."""
        return self._digest.hexdigest()
