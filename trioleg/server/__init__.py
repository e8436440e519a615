"""Hop 5: the OpenAI-compatible API, from a RequestOutput to the ``data:`` line."""
