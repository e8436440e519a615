"""Who may ask: whoever names one of the server's keys, as ``Authorization: Bearer KEY``.

Rules of this file: pure. Keys are compared by digests of one length, all of them each time, so that the time that a
refusal takes says nothing about any. They are never in a message or a log.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

__all__ = ["OPEN_PATHS", "REFUSAL", "is_authorized"]

# Load balancers and Prometheus have no key. They see figures, nobody's text.
OPEN_PATHS = frozenset({"/health", "/ready", "/live", "/metrics"})

# What openai's clients know as AuthenticationError.
REFUSAL = {
    "message": "the request names no key of this server; allowed: Authorization: Bearer KEY",
    "type": "invalid_request_error",
    "param": None,
    "code": "invalid_api_key",
}


def is_authorized(authorization: str | None, keys: Sequence[str]) -> bool:
    """Whether the header's value (None: there was no such header) names one of ``keys``. It has a character for each
    byte, as HTTP's headers have; a key is in UTF-8 there."""
    scheme, _, named = (authorization or "").partition(" ")
    digest = _digest(named.strip().encode("latin-1", "replace"))
    found = [
        hmac.compare_digest(digest, _digest(key.encode("utf-8", "surrogateescape"))) for key in keys
    ]
    return scheme.lower() == "bearer" and any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
