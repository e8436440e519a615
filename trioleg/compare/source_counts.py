"""What the legs' sources have to do about concurrency, counted by syntax tree: how much code, and places that spawn,
that catch broadly, that catch a cancel, that clean up, and that handle an exception as a value.

Rules of this file: a place is counted by how it is written, whether or not it is good; the counts say where to look,
and are no grades. ``SOURCES`` is the only place that says which files count, and why; what is counted is the part of
each leg that brings outputs from the engine's socket to whoever reads them. The parsing of HTTP, the processes of the
engine and what all legs share (``output/``, ``ipc/codec.py``, ``server/protocol.py``, ``server/sse.py``) are in nobody's
count, so that no leg is charged for what another takes from a library. trioleg and vLLM serve more than the twins do
(adapters, pooling, controls, restarts) in the same files, so their lines are no ratio of shapes.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ..errors import TriolegError
from .legs import ASYNCIO, TASKGROUP, TRIOLEG, VLLM

__all__ = [
    "COUNTED",
    "REMARK",
    "SOURCES",
    "Counts",
    "Source",
    "SourceCount",
    "count_code",
    "count_sources",
    "totals",
]


@dataclass(frozen=True, slots=True)
class Source:
    """``path``: from the package's folder on, may be a pattern. ``only``: classes and functions of its top level that
    count; empty: all of it. ``why``: what it does on the way, in this leg."""

    path: str
    why: str
    only: tuple[str, ...] = ()


SOURCES: dict[str, tuple[Source, ...]] = {
    TRIOLEG: (
        Source("runtime/engine_link.py", "reads an engine's outputs, and watches it"),
        Source("runtime/llm.py", "the object that is asked"),
        Source("runtime/opening.py", "its block, and the order in which it ends"),
        Source("runtime/requests.py", "the requests that live"),
        Source("runtime/request_stream.py", "one request: what is iterated, and its end"),
        Source("runtime/mailbox.py", "what lies between reader and request"),
        Source("runtime/outbox.py", "ABORTs, and those that could not leave"),
        Source("runtime/deadlines.py", "the timer of all requests"),
        Source("runtime/endings.py", "an ending as an error"),
        Source("server/stream.py", "an answer as a stream of frames"),
        Source("server/app.py", "a request's nursery, and who hears of a client that leaves"),
        Source("server/serve.py", "the server's block, and its end"),
    ),
    ASYNCIO: (
        Source("compare/asyncio_twin/*.py", "the whole leg, from socket to frames"),
        Source("compare/asyncio_common/*.py", "what it shares with the other twin"),
    ),
    TASKGROUP: (
        Source("compare/taskgroup_twin/*.py", "the whole leg, from socket to frames"),
        Source("compare/asyncio_common/*.py", "what it shares with the other twin"),
    ),
    VLLM: (
        Source("v1/engine/async_llm.py", "the object that is asked, and what is iterated"),
        Source(
            "v1/engine/core_client.py",
            "reads an engine's outputs, and watches it; the asyncio client of one engine",
            ("BackgroundResources", "MPClient", "AsyncMPClient", "_process_utility_output"),
        ),
        Source(
            "v1/engine/output_processor.py",
            "what lies between reader and request",
            ("RequestOutputCollector",),
        ),
        Source(
            "entrypoints/serve/utils/api_utils.py",
            "who hears of a client that leaves",
            ("listen_for_disconnect", "with_cancellation"),
        ),
        Source("entrypoints/launchers/launcher.py", "the server, and its end"),
    ),
}


@dataclass(slots=True)
class Counts:
    """``lines``: of code, without blank lines, comments and docstrings. The others are places.

    ``spawns``: tasks, threads and gathered coroutines. ``catches_broadly``: Exception, BaseException, their groups, or
    anything, by ``except`` or ``suppress``. ``catches_cancel``: CancelledError, Cancelled or GeneratorExit by name,
    and what catches BaseException, which is broad as well. ``cleans_up``: finally, and calls of close, aclose, cancel,
    shutdown, stop, term, terminate, kill. ``left_to_collector``: ``__del__``, weakref and atexit, which run when
    somebody else says so. ``errors_as_values``: an exception that is put into a queue or a future, and ``isinstance``
    against an exception of any kind.
    """

    lines: int = 0
    spawns: int = 0
    catches_broadly: int = 0
    catches_cancel: int = 0
    cleans_up: int = 0
    left_to_collector: int = 0
    errors_as_values: int = 0

    def add(self, other: Counts) -> None:
        """Sum up."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(frozen=True, slots=True)
class SourceCount:
    """Of one file of a leg. ``path``: from its package on. ``only``: what of it counts; empty: all."""

    leg: str
    path: str
    why: str
    only: list[str]
    counts: Counts


def count_sources(leg: str, package: Path) -> list[SourceCount]:
    """Every file of ``SOURCES`` for ``leg``, below ``package``. Raises ``TriolegError`` if one is not there, or has not
    what is to count: another version than this table knows."""
    counted = []
    for source in SOURCES[leg]:
        paths = sorted(package.glob(source.path))
        if not paths:
            raise TriolegError(f"there is no {source.path} in the sources of {leg} to count")
        for path in paths:
            name = path.relative_to(package).as_posix()
            counts = count_code(path.read_text(encoding="utf-8"), source.only, name)
            counted.append(SourceCount(leg, name, source.why, list(source.only), counts))
    return counted


def count_code(source: str, only: Iterable[str] = (), name: str = "the source") -> Counts:
    """Of Python code. Raises ``TriolegError`` if it has not all of ``only``."""
    tree = ast.parse(source)
    wanted = set(only)
    if not wanted:
        return _count([tree], source)
    roots = [node for node in tree.body if getattr(node, "name", None) in wanted]
    if missing := wanted - {getattr(node, "name", "") for node in roots}:
        raise TriolegError(f"{name} has no {', '.join(sorted(missing))} to count")
    return _count(roots, source)


def _count(roots: Sequence[ast.AST], source: str) -> Counts:
    counts = Counts(lines=len(_code_lines(source) & _lines_of(roots) - _docstring_lines(roots)))
    for root in roots:
        for node in ast.walk(root):
            for kind in _kinds(node):
                setattr(counts, kind, getattr(counts, kind) + 1)
    return counts


# ---------------------------------------------------------------------- lines

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _code_lines(source: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }


def _lines_of(roots: Iterable[ast.AST]) -> set[int]:
    lines: set[int] = set()
    for root in roots:
        if isinstance(root, ast.Module):
            for node in root.body:
                lines |= _lines_of([node])
        elif isinstance(root, ast.stmt) and root.end_lineno is not None:
            decorators = [one.lineno for one in getattr(root, "decorator_list", ())]
            lines |= set(range(min([root.lineno, *decorators]), root.end_lineno + 1))
    return lines


def _docstring_lines(roots: Iterable[ast.AST]) -> set[int]:
    lines: set[int] = set()
    for root in roots:
        for node in ast.walk(root):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0] if node.body else None
                if ast.get_docstring(node, clean=False) is not None and first is not None:
                    lines |= _lines_of([first])
    return lines


# ---------------------------------------------------------------------- places

_SPAWNS = {"create_task", "ensure_future", "start_soon", "gather", "Thread", "spawn_system_task"}
# These have a ``start`` that spawns; so have others that do not.
_NURSERIES = ("nursery", "task_group", "tasks")
_BROAD = {"", "Exception", "BaseException", "ExceptionGroup", "BaseExceptionGroup"}
_CANCELS = {"", "BaseException", "BaseExceptionGroup", "CancelledError", "Cancelled"}
_CANCELS |= {"GeneratorExit"}
_ENDS = {"close", "aclose", "cancel", "shutdown", "stop", "term", "terminate", "kill"}
_HANDS_ON = {"put", "put_nowait", "set_exception", "send_nowait"}


def _kinds(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ExceptHandler):
        yield from _kinds_of_catch(_names(node.type))
        yield from _handed_on(node)
    elif isinstance(node, ast.Try) and node.finalbody:
        yield "cleans_up"
    elif isinstance(node, ast.FunctionDef) and node.name == "__del__":
        yield "left_to_collector"
    elif isinstance(node, ast.Call):
        yield from _kinds_of_call(node)


def _kinds_of_call(node: ast.Call) -> Iterator[str]:
    name, owner = _last_name(node.func), _owner(node.func)
    if name in _SPAWNS or (name == "start" and owner.lower().endswith(_NURSERIES)):
        yield "spawns"
    elif owner in {"weakref", "atexit"}:
        yield "left_to_collector"
    elif name in _ENDS and isinstance(node.func, ast.Attribute):
        yield "cleans_up"
    elif name == "suppress":
        yield from _kinds_of_catch([_last_name(one) for one in node.args])
    elif (
        name == "isinstance"
        and any(
            kind in _BROAD or kind.endswith(("Error", "Exception"))
            for kind in _names(node.args[-1])
        )
    ) or (name in _HANDS_ON and any(map(_makes_error, node.args))):
        yield "errors_as_values"


def _kinds_of_catch(names: list[str]) -> Iterator[str]:
    if _BROAD.intersection(names):
        yield "catches_broadly"
    if _CANCELS.intersection(names):
        yield "catches_cancel"


def _handed_on(handler: ast.ExceptHandler) -> Iterator[str]:
    """The error that was caught, put somewhere."""
    for node in ast.walk(handler):
        if isinstance(node, ast.Call) and _last_name(node.func) in _HANDS_ON:
            names = {one.id for one in node.args if isinstance(one, ast.Name)}
            if handler.name is not None and handler.name in names:
                yield "errors_as_values"


def _makes_error(argument: ast.expr) -> bool:
    if not isinstance(argument, ast.Call):
        return False
    return _last_name(argument.func).endswith(("Error", "Exception"))


def _names(kind: ast.expr | None) -> list[str]:
    if isinstance(kind, ast.BinOp):
        return [*_names(kind.left), *_names(kind.right)]
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return [_last_name(one) for one in kinds]


def _last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _owner(node: ast.expr) -> str:
    return _last_name(node.value) if isinstance(node, ast.Attribute) else ""


# ---------------------------------------------------------------------- what is shown

REMARK = (
    "Counted by how it is written, good or not. trioleg and vLLM serve more than the twins do, in the same files, so "
    "their lines are no ratio of shapes."
)
COUNTED = {
    "lines": "lines of code",
    "spawns": "places that spawn",
    "catches_broadly": "places that catch broadly",
    "catches_cancel": "places that catch a cancel",
    "cleans_up": "places that clean up",
    "left_to_collector": "clean-up left to the collector",
    "errors_as_values": "exceptions as values",
}


def totals(sources: Iterable[SourceCount]) -> dict[str, Counts]:
    """The sum of each leg's files."""
    summed: dict[str, Counts] = {}
    for one in sources:
        summed.setdefault(one.leg, Counts()).add(one.counts)
    return summed
