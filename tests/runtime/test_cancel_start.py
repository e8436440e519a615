"""A cancel while ``open_llm`` starts a real engine process: wherever it strikes, no process and no folder stays.

The start's stages are seen from outside: by the processes that there are, by the socket files in the private
folder, and by the first question to the engine.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from process_helpers import wait_until
from programs import descendants

from trioleg import open_llm
from trioleg.runtime.engine_link import EngineLink

GENEROUS_S = 60.0


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the private folders of this test are made: a path short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def has_folder(folders: Path) -> bool:
    return any(folders.iterdir())


def has_guardian(folders: Path) -> bool:
    return bool(descendants(os.getpid()))


def has_engine(folders: Path) -> bool:
    """It imports for a while before it says HELLO."""
    return len(descendants(os.getpid())) >= 2


def has_said_hello(folders: Path) -> bool:
    """The legs are bound when HELLO has come; the engine then loads."""
    return any(folders.glob("*/out*"))


def everything_left(folders: Path) -> list[object]:
    return [*descendants(os.getpid()), *folders.iterdir()]


def write_script(tmp_path: Path, **fields: object) -> Path:
    file = tmp_path / "script.json"
    file.write_text(json.dumps({"steps": [[504]], **fields}))
    return file


@pytest.mark.parametrize("stage", [has_folder, has_guardian, has_engine, has_said_hello])
@pytest.mark.parametrize("wait_until_ready", [True, False], ids=["waiting", "in the body"])
async def test_while_it_loads(
    smollm2: Path,
    tmp_path: Path,
    folders: Path,
    stage: Callable[[Path], bool],
    wait_until_ready: bool,
) -> None:
    script = write_script(tmp_path, load_s=600)
    is_cancelled = False
    with trio.fail_after(GENEROUS_S):
        async with trio.open_nursery() as nursery:

            async def cancel_at_stage() -> None:
                nonlocal is_cancelled
                await wait_until(lambda: stage(folders))
                is_cancelled = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(cancel_at_stage)
            async with open_llm(smollm2, script=script, wait_until_ready=wait_until_ready):
                assert not wait_until_ready
                await trio.sleep_forever()
    assert is_cancelled
    assert everything_left(folders) == []


async def test_at_the_first_question(
    smollm2: Path, tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has said READY and is asked what it can do."""
    call_utility = EngineLink.call_utility
    scope = trio.CancelScope()

    async def call_and_cancel(self: EngineLink, method: str, *args: Any) -> Any:
        scope.cancel()
        return await call_utility(self, method, *args)

    monkeypatch.setattr(EngineLink, "call_utility", call_and_cancel)
    with trio.fail_after(GENEROUS_S), scope:
        async with open_llm(smollm2, script=write_script(tmp_path)):
            pytest.fail("it was cancelled before it was ready")
    assert scope.cancelled_caught
    assert everything_left(folders) == []
