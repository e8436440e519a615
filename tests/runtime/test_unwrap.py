"""Which error leaves ``open_llm`` when there are several."""

from __future__ import annotations

import logging

import pytest
import trio

from trioleg.runtime.unwrap import unwrapped


async def run(body_error: BaseException | None, task_error: BaseException | None) -> None:
    async def task() -> None:  # noqa: ASYNC124 - it is started as a task
        if task_error is not None:
            raise task_error

    with unwrapped() as body:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)
            try:
                if body_error is not None:
                    raise body_error
                await trio.sleep_forever()
            except BaseException as error:
                body.error = error
                raise


async def test_the_bodys_error_wins_and_the_other_one_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = ValueError("the body's")
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="the body's") as caught:
        await run(error, KeyError("a task's"))
    assert caught.value is error
    assert caught.value.__context__ is None
    assert "a task's" in caplog.text


async def test_an_error_that_says_the_same_is_not_logged_beside_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="the engine is gone"):
        await run(ValueError("the engine is gone"), ValueError("the engine is gone"))
    assert not caplog.records
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="the engine is gone"):
        await run(ValueError("the engine is gone"), OSError("the engine is gone"))
    assert "OSError" in caplog.text


async def test_a_group_of_the_bodys_own_leaves_as_that_group() -> None:
    group = ExceptionGroup("the body's", [ValueError("x")])
    with pytest.raises(ExceptionGroup) as caught:  # noqa: ASYNC401 - identity is the point
        await run(group, None)
    assert caught.value is group


async def test_a_tasks_error_comes_out_as_itself() -> None:
    with pytest.raises(KeyError):
        await run(None, KeyError("a task's"))


def test_an_interrupt_wins_over_a_tasks_error() -> None:
    with pytest.raises(KeyboardInterrupt), unwrapped():
        raise BaseExceptionGroup("both", [KeyError("a task's"), KeyboardInterrupt()])


async def test_a_cancel_passes() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await run(None, None)
    assert scope.cancelled_caught
