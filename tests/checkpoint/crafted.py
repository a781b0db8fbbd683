"""Manifests as someone writes them who means harm: their digest is right."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any


def body_of(checkpoint: Path) -> bytes:
    """The JSON of a manifest."""
    return (checkpoint / "manifest.json").read_bytes().partition(b"\n")[2]


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What the JSON of a manifest says."""
    found: dict[str, Any] = json.loads(body_of(checkpoint))
    return found


def put_body(checkpoint: Path, body: bytes) -> None:
    """Replace the JSON of a manifest."""
    digest = blake2b(body, digest_size=32).hexdigest()
    head = f"lockstep checkpoint 1 {digest}\n".encode()
    (checkpoint / "manifest.json").write_bytes(head + body)


def put_facts(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Replace what the JSON of a manifest says."""
    put_body(checkpoint, json.dumps(facts).encode())
