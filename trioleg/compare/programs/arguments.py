"""What every program of a leg is told: see ``legs.py``. Standard library alone: vLLM's interpreter reads it too."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MODEL", "Arguments", "read_arguments"]

# Under which the model is served.
MODEL = "model"


@dataclass(frozen=True)
class Arguments:
    """``engine``: its command, but for ``--handshake ADDRESS``. One of ``port`` and ``consume`` is None."""

    directory: Path
    engine: list[str]
    probe: Path
    port: int | None
    consume: str | None
    fault: str | None
    lanes: Path | None
    options: dict[str, str]


def read_arguments(argv: list[str] | None = None) -> Arguments:
    """Of the command line. Leaves by ``SystemExit`` for what it does not know."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--engine", type=json.loads, required=True)
    parser.add_argument("--probe", type=Path, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--port", type=int)
    what.add_argument("--consume")
    parser.add_argument("--fault")
    parser.add_argument("--lanes", type=Path)
    parser.add_argument("--option", action="append", default=[])
    given = parser.parse_args(argv)
    options = dict(one.split("=", 1) for one in given.option)
    return Arguments(
        given.directory,
        given.engine,
        given.probe,
        given.port,
        given.consume,
        given.fault,
        given.lanes,
        options,
    )
