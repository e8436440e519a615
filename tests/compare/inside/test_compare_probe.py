"""The probe's protocol, from outside, with a loop that is a plain function."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from trioleg.bench.leg_control import open_remote
from trioleg.compare.inside import probe as probe_module
from trioleg.compare.inside.probe import Probe
from trioleg.errors import TriolegError

PATIENCE_S = 30.0


def census() -> dict[str, Any]:
    names = Counter(f"task {i}" for i in range(200))
    names["many"] = 7
    return {"tasks": names.total(), "names": names, "requests": 3}


def at_once(function: Callable[[], None]) -> None:
    function()


async def ask(path: Path, *words: str) -> list[dict[str, Any]]:
    with trio.fail_after(PATIENCE_S):
        async with open_remote(path) as remote:
            return [await remote.tell(word) for word in words]


async def test_census_names_the_most_frequent_tasks_and_counts_all(tmp_path: Path) -> None:
    Probe(tmp_path / "probe").attach(at_once, census)
    (told,) = await ask(tmp_path / "probe", "census")
    assert (told["tasks"], told["requests"]) == (207, 3)
    assert len(told["names"]) == 100
    assert next(iter(told["names"].items())) == ("many", 7)
    assert told["threads"] >= 1


async def test_steps_and_lanes_are_what_the_watch_says(tmp_path: Path) -> None:
    Probe(tmp_path / "probe").attach(at_once, census, lambda: 12, lambda: 34)
    assert await ask(tmp_path / "probe", "steps", "lanes") == [{"steps": 34}, {"events": 12}]


async def test_one_peer_after_another(tmp_path: Path) -> None:
    Probe(tmp_path / "probe").attach(at_once, census)
    for _ in range(3):
        await ask(tmp_path / "probe", "census")


async def test_a_word_that_nobody_knows(tmp_path: Path) -> None:
    Probe(tmp_path / "probe").attach(at_once, census)
    with pytest.raises(TriolegError, match=r"do is 'steps'; allowed: census"):
        await ask(tmp_path / "probe", "steps")


async def test_an_error_within_the_loop_is_told(tmp_path: Path) -> None:
    def fail() -> int:
        raise ValueError("no such thing")

    Probe(tmp_path / "probe").attach(at_once, census, lanes=fail)
    with pytest.raises(TriolegError, match="ValueError: no such thing"):
        await ask(tmp_path / "probe", "lanes")


async def test_a_loop_that_has_ended(tmp_path: Path) -> None:
    def refuse(_function: Callable[[], None]) -> None:
        raise RuntimeError("closed")

    Probe(tmp_path / "probe").attach(refuse, census)
    with pytest.raises(TriolegError, match="the loop has ended: RuntimeError: closed"):
        await ask(tmp_path / "probe", "census")


@pytest.mark.parametrize("is_attached", [False, True])
async def test_a_loop_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_attached: bool
) -> None:
    monkeypatch.setattr(probe_module, "_LOOP_S", 0.05)
    probe = Probe(tmp_path / "probe")
    if is_attached:
        probe.attach(lambda _function: None, census)
    with pytest.raises(TriolegError, match=r"the loop did not (start|answer) within 0.05 s"):
        await ask(tmp_path / "probe", "census")


async def test_what_is_asked_before_the_loop_runs_waits_for_it(tmp_path: Path) -> None:
    probe = Probe(tmp_path / "probe")
    threading.Timer(0.1, probe.attach, [at_once, census]).start()
    (told,) = await ask(tmp_path / "probe", "census")
    assert told["tasks"] == 207
