"""``trioleg serve`` whole, with a scripted engine in place of the one that needs torch.

    python scripted_serve.py '{"script": "s.json", "llm": {…}, "server": {…}}' serve MODEL --port 0

Everything else is the program itself: its command line, signals, exit codes. ``llm`` and ``server`` are
settings of ``LLMConfig`` and ``ServerConfig`` for which it has no option. Without "script" the engine is
what the command line says. "files": the soft and the hard limit on open files that it finds.
On SIGUSR1 it says how many tasks it has.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import resource
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import trio

from trioleg import cli, serving
from trioleg.runtime import opening


def main() -> None:
    settings = json.loads(sys.argv.pop(1))
    if "files" in settings:
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(settings["files"]))
    answers = itertools.count(1)
    signal.signal(signal.SIGUSR1, lambda *_: _say_tasks(next(answers)))
    run_server = serving.run_server

    async def run_with_settings(model: str, llm: Any, server: Any, *more: Any) -> None:
        llm = dataclasses.replace(llm, **settings.get("llm", {}))
        server = dataclasses.replace(server, **settings.get("server", {}))
        await run_server(model, llm, server, *more)

    serving.run_server = run_with_settings
    if "script" in settings:
        opening.open_llm = partial(opening.open_llm, script=Path(settings["script"]))
    cli.main()


def _say_tasks(answer: int) -> None:
    living = trio.lowlevel.current_statistics().tasks_living
    sys.stderr.write(f"answer {answer}: {living} tasks\n")


if __name__ == "__main__":
    main()
