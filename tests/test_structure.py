"""The shape of the house: the layering, the pure core, who owns nurseries, and what never happens.

Every rule has a self-test: a few lines that break it must be caught, and their honest neighbour not.
"""

from __future__ import annotations

import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structure_rules import (
    MAY_IMPORT,
    NURSERY_OWNERS,
    ON_TOP,
    PURE_FOLDERS,
    PURE_MODULES,
    RULES,
    Module,
    arrows,
    async_generators,
    import_graph,
    light_front_end,
    load_package,
    no_caught_cancel,
    no_hidden_cleanup,
    nurseries,
    pure,
)

ROOT = Path(__file__).parents[1]
MODULES = load_package()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Module], Iterator[str]]) -> None:
    assert [found for module in MODULES for found in rule(module)] == []


def test_nothing_imports_in_circles() -> None:
    graphlib.TopologicalSorter(import_graph(MODULES)).prepare()


def test_the_lists_name_what_exists() -> None:
    names = {module.name for module in MODULES}
    parts = {module.part for module in MODULES}
    assert set(MAY_IMPORT) | ON_TOP <= parts
    assert names >= PURE_MODULES.union(*PURE_FOLDERS.values())
    owners = {module.name for module in MODULES if "open_nursery" in module.source}
    assert set(NURSERY_OWNERS) == owners


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (arrows, "output.stop", "from ..runtime import llm"),
        (arrows, "ipc.sockets", "from ..output.processor import OutputProcessor"),
        (arrows, "engine.core", "def f():\n    from trioleg.server import app"),
        (arrows, "runtime.llm", "from ..testing.transport import ScriptedTransport"),
        (arrows, "chat", "from . import cli"),
        (arrows, "extra", "import os"),
        (pure, "output.stop", "import trio"),
        (pure, "server.sse", "from zmq.utils import jsonapi"),
        (pure, "engine.core", "from .process import run_engine"),
        (pure, "ipc.codec", "async def f(): pass"),
        (pure, "output.stop", "from ..ipc.codec import decode_outputs\nfrom ..ipc import sockets"),
        (async_generators, "runtime.llm", "async def f():\n    yield 1"),
        (async_generators, "runtime.llm", "async def f():\n    g((x async for x in y))"),
        (nurseries, "output.stop", "async def f():\n    async with trio.open_nursery(): pass"),
        (no_hidden_cleanup, "runtime.llm", "class A:\n    def __del__(self): pass"),
        (no_hidden_cleanup, "runtime.llm", "import weakref"),
        (no_hidden_cleanup, "compare.asyncio_twins", "import weakref"),
        (no_hidden_cleanup, "runtime.llm", "trio.lowlevel.spawn_system_task(f)"),
        (no_caught_cancel, "runtime.llm", "try: f()\nexcept trio.Cancelled: raise"),
        (no_caught_cancel, "runtime.llm", "try: f()\nexcept (OSError, Cancelled): pass"),
        (no_caught_cancel, "runtime.llm", "try: f()\nexcept: pass"),
        (no_caught_cancel, "runtime.llm", "try: f()\nexcept BaseException as e: log(e)"),
        (no_caught_cancel, "runtime.llm", "with suppress(BaseException): f()"),
        (no_caught_cancel, "runtime.llm", "with suppress(BaseExceptionGroup): f()"),
        (light_front_end, "server.app", "def f():\n    import torch"),
        (light_front_end, "engine.core", "import vllm"),
        (light_front_end, "bench.leg", "from trioleg.bench.vllm_api_server import main"),
    ],
)
def test_a_rule_catches_its_violation(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    assert list(rule(_module(name, source)))


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (arrows, "server.app", "from ..runtime.llm import LLM"),
        (arrows, "__main__", "from .cli import main"),
        (pure, "output.stop", "from ..messages import FinishReason\nfrom . import merge"),
        (pure, "engine.core", "from .scheduler import Scheduler"),
        (
            async_generators,
            "runtime.llm",
            "@contextlib.asynccontextmanager\nasync def f():\n    yield 1",
        ),
        (async_generators, "runtime.llm", "async def f():\n    def g():\n        yield 1"),
        (no_caught_cancel, "runtime.llm", "try: f()\nexcept BaseException:\n    g()\n    raise"),
        (no_caught_cancel, "runtime.llm", "try: f()\nexcept Exception: pass"),
        (
            no_caught_cancel,
            "runtime.llm",
            "try: f()\nexcept BaseExceptionGroup as g:\n    try: raise one(g)\n    finally: h()",
        ),
        (async_generators, "compare.asyncio_twin.llm", "async def f():\n    yield 1"),
        (no_hidden_cleanup, "compare.asyncio_twin.llm", "import weakref"),
        (light_front_end, "engine.core", "import torch"),
        (light_front_end, "bench.vllm_api_server", "import vllm"),
    ],
)
def test_a_rule_lets_its_neighbour_pass(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    assert list(rule(_module(name, source))) == []


def test_a_circle_is_caught() -> None:
    known = frozenset({"output.a", "output.b"})
    circle = [
        Module("output.a", "from . import b", known=known),
        Module("output.b", "from .a import A", known=known),
    ]
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(import_graph(circle)).prepare()


def _module(name: str, source: str) -> Module:
    return Module(name, source, known=frozenset(module.name for module in MODULES))


def test_the_front_end_loads_nothing_heavy() -> None:
    code = (
        "import sys, trioleg.server.app, trioleg.server.serve, trioleg.runtime.llm, trioleg.cli\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# A path that exists on one machine alone. Spelled so that this line does not match itself.
_ONE_MACHINE = re.compile(r"(?<![\w./~-])/(?:wor[k]|hom[e]|roo[t]|User[s])/")
_TEXTS = {".py", ".md", ".toml", ".json", ".html", ".js", ".css", ".txt", ".cfg", ""}


def _texts() -> Iterator[Path]:
    for name in ("trioleg", "tests", "docs", ".ci"):
        yield from (path for path in (ROOT / name).rglob("*") if path.suffix in _TEXTS)
    yield from (ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", ".flake8"))


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in _texts()
        if path.is_file()
        for line in path.read_text(encoding="utf-8").splitlines()
        if _ONE_MACHINE.search(line)
    ]
    assert found == []
    assert _ONE_MACHINE.search("see /hom" + "e/someone/notes")
