"""Tests of ask.py with the fixture ``scripted_server``, which comes with trioleg.

In a checkout of trioleg: pip install . pytest openai && pytest docs/examples/testing
"""

import pytest
from ask import ask


@pytest.fixture(autouse=True)
def environment(scripted_server, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", scripted_server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "any")


def test_an_answer(scripted_server):
    scripted_server.answer("Paris, of course.")
    assert ask("What is the capital of France?", "scripted") == "Paris, of course."
    (request,) = scripted_server.requests
    assert request.body["messages"][0]["content"] == "What is the capital of France?"
    assert request.headers["authorization"] == "Bearer any"


def test_a_character_in_two_pieces(scripted_server):
    scripted_server.answer(["K", b"\xc3", b"\xb6", "ln"])
    assert ask("Where?", "scripted") == "Köln"


def test_the_engine_dies_in_the_middle(scripted_server):
    scripted_server.answer(["Par", "is"], die_after=1)
    assert ask("Where?", "scripted") == "Par [APIError]"


def test_an_engine_that_comes_back(scripted_server):
    scripted_server.answer("Paris")
    scripted_server.kill_engine()  # and for about a second there is none: 503
    scripted_server.wait_ready()
    assert ask("Where?", "scripted") == "Paris"


def test_patience_has_an_end(scripted_server):
    scripted_server.always("never said", stall_after=0)
    answer = ask("Where?", "scripted", patience=0.3)
    assert answer == " [APITimeoutError]"
    for request in scripted_server.requests:  # the client tried it three times
        request.wait_aborted()
