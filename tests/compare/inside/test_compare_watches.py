"""What the watches see of a small asyncio program and of a small Trio program: every event, in order."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import uvloop

from trioleg.compare.inside.asyncio_watch import AsyncioWatch
from trioleg.compare.inside.lanes import Lanes
from trioleg.compare.inside.trio_watch import TrioWatch


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def life(events: list[dict[str, Any]], name: str) -> list[str]:
    return [
        event["event"] + (f": {event['detail']}" if event["detail"] else "")
        for event in events
        if event["name"] == name
    ]


def one(events: list[dict[str, Any]], name: str, what: str) -> dict[str, Any]:
    (found,) = [event for event in events if event["name"] == name and event["event"] == what]
    return found


# ---------------------------------------------------------------------- lanes


def test_lanes_keep_the_last_events(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path / "lanes")
    lane = lanes.lane("one", None)
    for i in range(25_000):
        lanes.note(lane, "resumed", str(i))
    assert lanes.write() == 20_000
    assert read(tmp_path / "lanes")[-1]["detail"] == "24999"


# ---------------------------------------------------------------------- asyncio


async def waits() -> None:
    await asyncio.Event().wait()


async def fails() -> None:  # noqa: ASYNC124 - a task of one step
    raise ValueError("no")


async def yields_twice() -> str:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return "done"


async def small_asyncio() -> None:
    waiting = asyncio.create_task(waits(), name="the waiting one")
    failing = asyncio.create_task(fails())
    yielding = asyncio.create_task(yields_twice())
    assert await yielding == "done"
    waiting.cancel("nobody waits for it")
    results = await asyncio.gather(waiting, failing, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError, ValueError]


def run_asyncio(main: Callable[[], Awaitable[None]], new_loop: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())  # type: ignore[arg-type]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_lives_of_asyncio_tasks(tmp_path: Path, new_loop: Callable[[], Any]) -> None:
    lanes = Lanes(tmp_path / "lanes")

    async def main() -> None:
        watch = AsyncioWatch(lambda: 0, lanes)
        program = asyncio.create_task(small_asyncio())
        await program
        watch.write_lanes()

    run_asyncio(main, new_loop)
    events = read(tmp_path / "lanes")
    step = ["resumed", "parked"]
    assert life(events, "the waiting one") == [
        "spawned",
        *step,
        "cancelled: nobody waits for it",
        "resumed",
        "ended: cancelled",
    ]
    assert life(events, "fails") == ["spawned", "resumed", "raised: ValueError('no')"]
    assert life(events, "yields_twice") == ["spawned", *step, *step, "resumed", "ended"]
    owner = one(events, "small_asyncio", "spawned")
    assert owner["parent"] is None
    assert one(events, "fails", "spawned")["parent"] == owner["task"]
    times = [event["at"] for event in events]
    assert times == sorted(times)


def test_a_watched_task_looks_like_another(tmp_path: Path) -> None:
    async def main() -> None:
        AsyncioWatch(lambda: 0, Lanes(tmp_path / "lanes"))
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        (frame,) = task.get_stack()
        assert frame.f_code is waits.__code__
        assert "coro=<waits()" in repr(task)
        assert task.get_coro().__qualname__ == "waits"
        task.cancel()

    asyncio.run(main())


def test_a_census_of_asyncio_and_its_steps() -> None:
    async def main() -> None:
        watch = AsyncioWatch(lambda: 5)
        waiting = asyncio.create_task(waits(), name="the waiting one")
        census = watch.census()
        assert census == {
            "tasks": 2,
            "names": {"the waiting one": 1, MAIN: 1},
            "requests": 5,
        }
        assert watch.steps() == 0
        # It was there before the count; both of its steps are counted, and both of ours.
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert watch.steps() == 4
        with pytest.raises(ValueError, match="nothing is recorded without --lanes"):
            watch.write_lanes()

    run = asyncio.Handle._run
    try:
        asyncio.run(main())
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


MAIN = "test_a_census_of_asyncio_and_its_steps.<locals>.main"


def test_steps_under_uvloop_need_lanes(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="of uvloop are counted with --lanes alone"):
            AsyncioWatch(lambda: 0).steps()
        watch = AsyncioWatch(lambda: 0, Lanes(tmp_path / "lanes"))
        assert watch.steps() == 0
        yielding = asyncio.create_task(yields_twice())
        await yielding
        assert watch.steps() == 3

    run_asyncio(main, uvloop.new_event_loop)


# ---------------------------------------------------------------------- Trio


async def sleeps_forever() -> None:
    await trio.sleep_forever()


async def fails_in_trio() -> None:
    await trio.lowlevel.checkpoint()
    raise ValueError("no")


async def fails_below_a_nursery() -> None:
    with pytest.RaisesGroup(ValueError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_in_trio)
            nursery.start_soon(sleeps_forever)


async def waits_for_two() -> None:
    async with trio.open_nursery() as nursery:
        for name in ("one of two", "the other"):
            nursery.start_soon(sleeps_forever, name=name)


async def small_trio() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waits_for_two)
        nursery.start_soon(sleeps_forever, name="the waiting one")
        nursery.start_soon(fails_below_a_nursery)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel(reason="nobody waits for it")


def test_the_lives_of_trio_tasks(tmp_path: Path) -> None:
    watch = TrioWatch(lambda: 0, Lanes(tmp_path / "lanes"))
    trio.run(small_trio, instruments=[watch])
    watch.write_lanes()
    events = read(tmp_path / "lanes")
    # What leaves its nursery is a group of cancels.
    assert life(events, "waits_for_two")[-1] == "ended: cancelled"
    *before, cancelled, resumed, ended = life(events, "the waiting one")
    assert before == ["spawned", "resumed", "parked"]
    assert cancelled.startswith(
        "cancelled: cancelled due to explicit with reason 'nobody waits for it' from task"
    ), "Trio has moved what a task is resumed with: see _cancel_delivered"
    assert (resumed, ended) == ("resumed", "ended: cancelled")
    assert life(events, "fails_in_trio") == [
        "spawned",
        "resumed",
        "parked",
        "resumed",
        "raised: ValueError('no')",
    ], "Trio has moved a nursery's errors: see _errors_beside"
    (cancel,) = [one for one in life(events, "sleeps_forever") if one.startswith("cancelled")]
    assert "child task raised exception ValueError('no')" in cancel
    owner = one(events, "fails_below_a_nursery", "spawned")
    assert one(events, "fails_in_trio", "spawned")["parent"] == owner["task"]
    assert life(events, "fails_below_a_nursery")[-1] == "ended"


async def test_a_census_of_trio_and_its_steps() -> None:
    watch = TrioWatch(lambda: 5)
    before = watch.census()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeps_forever, name="the waiting one")
        nursery.start_soon(sleeps_forever)
        census = watch.census()
        assert Counter(census["names"]) - Counter(before["names"]) == {
            "the waiting one": 1,
            "sleeps_forever": 1,
        }
        assert (census["tasks"] - before["tasks"], census["requests"]) == (2, 5)
        assert watch.steps() == 0
        await trio.testing.wait_all_tasks_blocked()
        # Both of the nursery's tasks, and ours.
        assert watch.steps() == 3
        nursery.cancel_scope.cancel()
    with pytest.raises(ValueError, match="nothing is recorded without --lanes"):
        watch.write_lanes()
