"""An engine that takes its time to load says so to the front end that started it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import trio
from engine_harness import GENEROUS_S, REPOSITORY

from trioleg.ipc.handshake import listen_for_engine
from trioleg.ipc.launch import open_engine_process, private_ipc_dir

# The tiny model is there at once: here every moment is long enough for a line.
PROGRAM = """
from trioleg.cli import main
from trioleg.engine import loading_log
loading_log._EVERY_S = 0.0
main()
"""


async def test_progress_comes_line_by_line_on_stderr(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = Path(shutil.copytree(tiny_dir, tmp_path / "tiny"))
    # The command line looks for it, the engine never does.
    (model_dir / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    lines: list[str] = []
    with trio.fail_after(GENEROUS_S), private_ipc_dir() as folder:
        async with listen_for_engine(f"ipc://{folder}/handshake") as listener:
            command = [sys.executable, "-c", PROGRAM, "engine", str(model_dir)]
            async with open_engine_process(
                [*command, "--handshake", listener.address, "--device", "cpu"],
                on_stderr_line=lines.append,
                stop_timeout=GENEROUS_S,
                ipc_dir=folder,
            ):
                accepted = await listener.accept()
                await accepted.transport.aclose()
    assert "loading tiny: 11 % of 0.0 GB" in lines
    assert "loaded tiny in 0 s" in lines
