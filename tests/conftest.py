"""Fixtures for every test: the real model, fetched once into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from trioleg import model_store


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M; the first run on a machine downloads it (93 MB)."""
    return model_store.pull("smollm2-135m")
