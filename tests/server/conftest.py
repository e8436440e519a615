"""Fixtures for the server's tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from certificates import Certificates, make_certificates
from ending_lines import EndingLines


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def ending_lines() -> Iterator[EndingLines]:
    """What the log says of requests that end during the test."""
    handler, logger = EndingLines(), logging.getLogger("trioleg.requests")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)
