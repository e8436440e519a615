"""The plugin, in pytest runs of its own: found, cheap, and with an example that holds."""

from __future__ import annotations

import os
import sys
import tomllib

import pytest
from programs import ROOT, running

PLUGIN = "trioleg.testing.pytest_plugin"
EXAMPLE = ROOT / "docs" / "examples" / "testing"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """This tree and the test's folder, and no proxy: a program under test reads its own."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}.")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def installed(pytester: pytest.Pytester) -> pytest.Pytester:
    """What an installation tells pytest of us: the entry points of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = "".join(f"[{group}]\n{_lines(of)}" for group, of in project["entry-points"].items())
    info = pytester.mkdir("trioleg-1.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trioleg\nVersion: 1\n")
    (info / "entry_points.txt").write_text(points)
    return pytester


def _lines(entry_points: dict[str, str]) -> str:
    return "".join(f"{name} = {value}\n" for name, value in entry_points.items())


def test_the_fixture_is_found_where_trioleg_is_installed(installed: pytest.Pytester) -> None:
    installed.makepyfile(
        """
        import httpx2, pytest

        def post(url):
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            return httpx2.post(f"{url}/chat/completions", json=body, trust_env=False)

        def test_answered(scripted_server):
            scripted_server.answer("Hello")
            answer = post(scripted_server.base_url)
            assert answer.json()["choices"][0]["message"]["content"] == "Hello"

        def test_of_its_own(scripted_server):
            assert scripted_server.requests == []
            answer = post(scripted_server.base_url)
            assert answer.status_code == 200, answer.text
        """
    )
    result = installed.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", timeout=120)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*this is request number 1 of the test, and no answer is left*"])


def test_what_is_left_over_fails_a_test_that_passed(installed: pytest.Pytester) -> None:
    """As an error of its teardown; one that failed or was skipped has said what is wrong."""
    installed.makepyfile(
        """
        import httpx2, pytest

        def test_no_answer(scripted_server):
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            httpx2.post(f"{scripted_server.base_url}/chat/completions", json=body, trust_env=False)

        def test_no_request(scripted_server):
            scripted_server.answer("unsaid")

        def test_failed(scripted_server):
            scripted_server.answer("unsaid")
            assert False

        def test_skipped(scripted_server):
            scripted_server.answer("unsaid")
            pytest.skip("here")
        """
    )
    result = installed.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", timeout=120)
    result.assert_outcomes(passed=2, errors=2, failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: no answer was left for request number 1 (/v1/chat/completions)",
            "E*AssertionError: nobody asked for the answer 'unsaid'",
        ]
    )


@pytest.mark.parametrize("options", [(), ("-p", PLUGIN)], ids=["conftest", "option"])
def test_it_may_be_named_as_well(installed: pytest.Pytester, options: tuple[str, ...]) -> None:
    """It is one plugin still, which says what it offers."""
    if not options:
        installed.makeconftest(f"pytest_plugins = [{PLUGIN!r}]")
    listed = installed.runpytest_subprocess("--fixtures", *options, timeout=120)
    listed.stdout.fnmatch_lines(
        ["scripted_server*", "*OpenAI-compatible server with scripted answers*"]
    )
    assert listed.ret == 0


def test_pytest_is_no_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [one for one in project["dependencies"] if "pytest" in one] == []


def test_loading_it_costs_nothing() -> None:
    heavy = ("trio", "zmq", "msgspec", "tokenizers", "quart", "hypercorn", "httpx2")
    code = f"import sys, {PLUGIN}; print(sorted(set({heavy}) & set(sys.modules)))"
    with running(sys.executable, "-c", code) as program:
        assert program.wait() == 0, program.said()
    assert program.stdout == "[]\n"


def test_the_example_holds() -> None:
    """Under warnings as errors, as its readers may run it."""
    argv = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, str(EXAMPLE)]
    with running(sys.executable, "-X", "dev", "-W", "error", *argv) as program:
        assert program.wait(120) == 0, program.said()
    assert "6 passed" in program.stdout
