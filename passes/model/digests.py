"""128 bits that stand for a tensor: for its content, or for where it comes from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from blake3 import blake3

__all__ = ["derived_digest", "digest_of", "digest_of_bytes", "digest_of_texts"]


def digest_of(array: np.ndarray) -> str:
    """128 bits of a tensor's row-major bytes, in hex; strings are told apart by their length and their UTF-8."""
    if array.dtype.kind in "OUS":
        items = array.ravel().tolist()
        return digest_of_texts(item if isinstance(item, bytes) else str(item).encode() for item in items)
    return digest_of_bytes(np.ascontiguousarray(array).view(np.uint8).data)


def derived_digest(source: str, how: str, numbers: Iterable[int]) -> str:
    """128 bits, in hex, for what is known by where it comes from; no content has the same."""
    return digest_of_bytes(repr(("unread", source, how, tuple(numbers))).encode())


def digest_of_texts(texts: Iterable[bytes]) -> str:
    return digest_of_bytes(b"".join(len(text).to_bytes(8, "little") + text for text in texts))


def digest_of_bytes(data: bytes | memoryview) -> str:
    """128 bits of BLAKE3: twice as fast as SHA-256 where processors compute that, and weights are gigabytes."""
    return blake3(data).hexdigest(length=16)
