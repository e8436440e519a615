"""``trioleg serve`` whole, with a scripted engine in place of the one that needs torch.

    python scripted_serve.py '{"script": "s.json", "llm": {…}, "server": {…}}' serve MODEL --port 0

Everything else is the program itself: its command line, signals, exit codes. ``llm`` and ``server`` are
settings of ``LLMConfig`` and ``ServerConfig`` for which it has no option. Without "script" the engine is
what the command line says.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from trioleg import cli, serving
from trioleg.runtime import opening


def main() -> None:
    settings = json.loads(sys.argv.pop(1))
    run_server = serving.run_server

    async def run_with_settings(model: str, llm: Any, server: Any, *more: Any) -> None:
        llm = dataclasses.replace(llm, **settings.get("llm", {}))
        server = dataclasses.replace(server, **settings.get("server", {}))
        await run_server(model, llm, server, *more)

    serving.run_server = run_with_settings
    if "script" in settings:
        opening.open_llm = partial(opening.open_llm, script=Path(settings["script"]))
    cli.main()


if __name__ == "__main__":
    main()
