"""Small JSON files that carry their own checksum.

There is exactly one way to write a value down, and a file is accepted only if it is, byte for byte, how its own value
is written. So no change to a sealed file goes unseen, not even one in its white space.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash


def seal(body: dict[str, Any]) -> bytes:
    """The file's bytes: the body with a `checksum` over everything else."""
    return _written({**body, "checksum": xxhash.xxh3_128_hexdigest(_written(body))})


def unseal(data: bytes) -> dict[str, Any]:
    """The body, `checksum` included.

    Raises:
        ValueError: the bytes are not JSON, or are not what `seal` wrote.
    """
    try:
        body = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(body, dict) or not isinstance(body.get("checksum"), str):
        raise ValueError("it has no checksum of its own")
    rest = {key: value for key, value in body.items() if key != "checksum"}
    if data != seal(rest):
        raise ValueError("its own checksum does not match")
    if b"\\ud" in data:
        json.dumps(rest, ensure_ascii=False).encode()  # half a surrogate pair is no text, and no file's name
    return body


def _written(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
