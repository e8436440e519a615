"""The fixture ``scripted_server`` for pytest, which finds it by itself where trioleg is installed.

Rules of this file: pytest loads it in every run of every project in the environment, so it imports nothing but
pytest until the fixture is asked for. Nothing else imports it: trioleg does not need pytest.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .server import ScriptedServer

__all__ = ["scripted_server"]


# Of a test's own part: a test that failed already has said what is wrong.
_has_passed = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    """Notes for the fixture how the test went."""
    outcome = yield
    if call.when == "call":
        item.stash[_has_passed] = outcome.get_result().passed


@pytest.fixture
def scripted_server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    """An OpenAI-compatible server with scripted answers, of this test's own: see ``ScriptedServer``.

    Where the test has passed, a request without an answer or an answer without a request fails its teardown. A
    fixture of your own can give it other settings: ``with trioleg.testing.scripted_server(…) as server``.
    """
    from .server import scripted_server as serve

    with serve() as server:
        yield server
        if request.node.stash.get(_has_passed, False):
            server.check()
