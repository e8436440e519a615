"""Requests' ids as clients see them: in OpenAI's form, by the kind of request, as vLLM has them.

Pure.
"""

from __future__ import annotations

__all__ = ["completion_id", "embedding_id"]


def completion_id(request_id: str) -> str:
    """Of a request for tokens."""
    return f"chatcmpl-{request_id}"


def embedding_id(request_id: str) -> str:
    """Of one prompt to a pooling model."""
    return f"embd-{request_id}"
