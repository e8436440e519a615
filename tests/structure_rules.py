"""The rules of the house as functions over syntax trees; ``test_structure`` applies and tests them.

A rule takes a ``Module`` and yields one sentence for each violation. Rules look at every import and
every node, function bodies and ``TYPE_CHECKING`` blocks included: a layer that is crossed only for a
type, or only now and then, is crossed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "trioleg"

# Arrows run one way: what each part may import of the others (and, if a folder, of itself).
FOUNDATION = frozenset({"errors", "config"})
PLAIN = frozenset(
    {
        "messages",
        "outputs",
        "param_checks",
        "prompts",
        "sampling_params",
        "grammar_gate",
        "grammar_trial",
        "ll_tokenizer",
        "lora",
        "structured_outputs",
        "tokenizer",
        "token_pieces",
        "chat_template",
        "model_store",
        "gguf_convert",
        "model_files",
        "pooling_model",
        "timeouts",
        "vllm_flags",
    }
)
_BELOW_RUNTIME = FOUNDATION | PLAIN | {"ipc", "output"}
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "config": frozenset({"errors", "lora", "timeouts", "vllm_flags"}),
    **dict.fromkeys(PLAIN, FOUNDATION | PLAIN),
    "ipc": FOUNDATION | PLAIN,
    "output": FOUNDATION | PLAIN,
    "engine": FOUNDATION
    | {
        "lora",
        "messages",
        "param_checks",
        "sampling_params",
        "grammar_gate",
        "ll_tokenizer",
        "structured_outputs",
        "tokenizer",
        "model_files",
        "ipc",
    },
    "runtime": _BELOW_RUNTIME,
    "batch_files": FOUNDATION,
    "offline": FOUNDATION | PLAIN | {"engine", "output"},
    "server": _BELOW_RUNTIME | {"runtime"},
}
# These sit on top and may import anything; nothing imports the command line but its own front door.
ON_TOP = frozenset(
    {
        "batch",
        "bench",
        "chat",
        "chat_server",
        "cli",
        "compare",
        "frontend_settings",
        "heap",
        "pull_bar",
        "serving",
        "testing",
        "trace",
        "trace_table",
        "__main__",
    }
)
IMPORTERS_OF_CLI = frozenset({"__main__"})

# Synchronous and without a runtime, so that any concurrency shape can be put round them: whole folders
# but for the shells named here, and single modules of the others.
PURE_FOLDERS = {
    "output": frozenset[str](),
    "engine": frozenset({"engine.process", "engine.busy_loop", "engine.output_sender"}),
}
PURE_MODULES = frozenset(
    {
        "ipc.codec",
        "ipc.versions",
        "frontend_settings",
        "offline",
        "server.authentication",
        "server.embeddings",
        "server.fields",
        "server.hypercorn_config",
        "server.hypercorn_settings",
        "server.ids",
        "server.logprobs",
        "server.model_names",
        "server.protocol",
        "server.refusals",
        "server.sse",
        "server.structured_outputs",
        "server.tls",
    }
)
RUNTIMES = frozenset({"trio", "asyncio", "zmq", "quart", "quart_trio", "anyio"})

# The only modules that own a nursery, each for one reason.
NURSERY_OWNERS = {
    "bench.churn": "the clients, beside who kills the engine",
    "bench.deaths": "the readers of the streams that are to be told",
    "bench.disconnects": "the busy streams beside which a client leaves",
    "bench.engine_subjects": "a measurement of an engine, beside the watch for its end",
    "bench.hop_engine": "an engine's sender beside what it reads",
    "bench.hop_leg": "the server and the engine's thread",
    "bench.hop_parts": "a sender, and the readers that are woken",
    "bench.load": "the probes and the small prompts beside a big one",
    "bench.played_engine": "the reader of an engine's input leg",
    "bench.processes": "a wait for a program's line, or for its end",
    "bench.scripted_server": "the program: signals beside the server",
    "bench.stalled": "readers beside clients that read nothing",
    "compare.programs.trioleg_consumers": "two readers of one program",
    "compare.pair": "clients that are watched at the same time",
    "compare.scenarios.consumers": "the ends of a program and of its engine, side by side",
    "compare.scenarios.ending": "several clients of one server, and who signals to it",
    "compare.scenarios.engines": "clients, beside whoever asks for the server's health",
    "compare.scenarios.faults": "clients of an engine that is told what to say meanwhile",
    "compare.scenarios.reading": "a neighbour, beside a client that reads slowly",
    "compare.split.on_trio": "the tasks of the shape that is measured",
    "engine.process": "the engine: requests in, outputs out, the busy loop's thread",
    "ipc.joining": "INIT, beside the watch for a head that refuses us",
    "ipc.launch": "an engine's process: its output and its end",
    "ipc.transport": "watches over both sockets of a leg",
    "runtime.engine_link": "the reader and the watch of one engine, and its last words",
    "runtime.adoption": "the first word of an engine, beside the end of its owner",
    "runtime.engines": "an engine that starts, beside the watch for one that fails to; who may join",
    "runtime.llm": "the engine's supervisor and the deadlines' timer",
    "runtime.opening": "an LLM, for as long as its block runs",
    "runtime.pooling": "the prompts of one call",
    "runtime.supervisor": "the link of an engine, beside the first question to it",
    "server.app": "one request: who takes its body, until it is there, beside who answers",
    "server.client_connection": "the requests of one connection",
    "server.connection": "the connections of a listener",
    "server.serve": "the listener beside the watch for the engine's death",
    "trace": "the server of one request",
    "serving": "the program: signals beside the server",
}


# The other shape of the study: vLLM's, in which a request is an async generator and what nobody uses any more is found
# by the garbage collector. It is good asyncio of its kind, and these are what it is compared by.
OTHER_SHAPE = "compare.asyncio_twin"


@dataclass(frozen=True)
class Module:
    """One source file: ``name`` is dotted without the package ("runtime.llm"; "" is the root)."""

    name: str
    source: str
    is_package: bool = False
    known: frozenset[str] = frozenset()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def part(self) -> str:
        return self.name.partition(".")[0]

    @property
    def has_other_shape(self) -> bool:
        return f"{self.name}.".startswith(f"{OTHER_SHAPE}.")

    @property
    def is_pure(self) -> bool:
        shells = PURE_FOLDERS.get(self.part)
        return self.name in PURE_MODULES or (shells is not None and self.name not in shells)

    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)

    def imports(self, root: ast.AST | None = None) -> Iterator[tuple[str, int]]:
        """Absolute dotted names with their lines; of a ``from`` import the submodule, if it is one."""
        for node in ast.walk(root or self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    yield (inner if own_name(inner) in self.known else base), node.lineno

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = ["trioleg", *self.name.split(".")] if self.name else ["trioleg"]
        parts = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*parts, node.module] if node.module else parts)


def load_package() -> list[Module]:
    """Every module of the package, each knowing the names of all."""
    names = {path: _dotted(path) for path in sorted(PACKAGE.rglob("*.py"))}
    known = frozenset(names.values())
    return [
        Module(name, path.read_text(encoding="utf-8"), path.name == "__init__.py", known)
        for path, name in names.items()
    ]


def _dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def own_name(imported: str) -> str | None:
    """ "trioleg.runtime.llm" → "runtime.llm"; None for a module that is not ours."""
    head, _, rest = imported.partition(".")
    return rest if head == "trioleg" else None


def arrows(module: Module) -> Iterator[str]:
    """Imports follow the layering that ``trioleg/__init__.py`` draws."""
    if not module.name:
        return  # the root only names what others hold, and loads it on first use
    if module.part not in MAY_IMPORT and module.part not in ON_TOP:
        yield f"{module.name}: has no place in the layering; give it one in {__name__}"
        return
    for imported, line in module.imports():
        target = (own_name(imported) or "").partition(".")[0]
        if not target or target == module.part:
            continue
        if target == "cli":
            allowed = module.part in IMPORTERS_OF_CLI
        else:
            allowed = module.part in ON_TOP or target in MAY_IMPORT[module.part]
        if not allowed:
            yield f"{module.name}:{line} imports {target}"


def pure(module: Module) -> Iterator[str]:
    """The pure core knows no runtime, has no ``async def``, and imports only what is pure or plain."""
    if not module.is_pure:
        return
    for imported, line in module.imports():
        if imported.partition(".")[0] in RUNTIMES:
            yield f"{module.name}:{line} is pure and imports {imported}"
        own = own_name(imported)
        if own and own.partition(".")[0] not in FOUNDATION | PLAIN:
            target = Module(own, "")
            if not target.is_pure and own != module.part:
                yield f"{module.name}:{line} is pure and imports {own}, which is not"
    for node in module.nodes():
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield f"{module.name}:{node.lineno} is pure and asynchronous"


def async_generators(module: Module) -> Iterator[str]:
    """No async generator, but under ``@asynccontextmanager``, which enters and leaves it in one task."""
    if module.has_other_shape:
        return
    for node in module.nodes():
        if isinstance(node, ast.AsyncFunctionDef) and _yields(node) and not _is_manager(node):
            yield f"{module.name}:{node.lineno} {node.name} is an async generator"
        if isinstance(node, ast.GeneratorExp) and (
            any(one.is_async for one in node.generators)
            or any(isinstance(inner, ast.Await) for inner in ast.walk(node.elt))
        ):
            yield f"{module.name}:{node.lineno} holds an async generator expression"


def _yields(function: ast.AsyncFunctionDef) -> bool:
    """True if the function's own body yields; nested functions have bodies of their own."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))
    return False


def _is_manager(function: ast.AsyncFunctionDef) -> bool:
    return any(_last_name(one) == "asynccontextmanager" for one in function.decorator_list)


def _last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def nurseries(module: Module) -> Iterator[str]:
    """A nursery is opened only where something is owned: ``NURSERY_OWNERS`` says where."""
    lines = [node.lineno for node in module.nodes() if _last_name(node) == "open_nursery"]
    if module.name not in NURSERY_OWNERS:
        yield from (f"{module.name}:{line} opens a nursery" for line in lines)


def no_hidden_cleanup(module: Module) -> Iterator[str]:
    """Nothing is cleaned up by the garbage collector, and nothing is spawned into the air."""
    if module.has_other_shape:
        return
    for node in module.nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "__del__":
            yield f"{module.name}:{node.lineno} defines __del__"
        if _last_name(node) == "spawn_system_task":
            yield f"{module.name}:{node.lineno} uses spawn_system_task"
    for imported, line in module.imports():
        if imported.partition(".")[0] in {"weakref", "_weakref"}:
            yield f"{module.name}:{line} imports weakref"


def no_caught_cancel(module: Module) -> Iterator[str]:
    """``Cancelled`` is never caught: by name, by a bare except that does not raise, or by suppress."""
    for node in module.nodes():
        if isinstance(node, ast.ExceptHandler):
            names = _caught(node.type)
            if "Cancelled" in names:
                yield f"{module.name}:{node.lineno} catches Cancelled"
            elif _catches_all(names) and not _raises_at_the_end(node.body):
                yield f"{module.name}:{node.lineno} swallows every exception, Cancelled included"
        if isinstance(node, ast.Call) and _last_name(node.func) == "suppress":
            for name in (_last_name(one) for one in node.args):
                if name == "Cancelled" or _catches_all([name]):
                    yield f"{module.name}:{node.lineno} suppresses {name}"


def _caught(kind: ast.expr | None) -> list[str]:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return [_last_name(one) for one in kinds]


def _catches_all(names: list[str]) -> bool:
    return any(name in {"", "BaseException", "BaseExceptionGroup"} for name in names)


def _raises_at_the_end(body: list[ast.stmt]) -> bool:
    last = body[-1]
    return isinstance(last, ast.Raise) or (
        isinstance(last, ast.Try) and _raises_at_the_end(last.body) and not last.handlers
    )


# torch takes seconds and hundreds of megabytes; only the engine's process may have it.
_HEAVY = frozenset({"torch", "numpy", "transformers", "safetensors", "gguf"})
_HEAVY_HOMES = frozenset({"engine", "gguf_convert"})
# Run by vLLM's interpreter: peers of a bench and of the study, and no part of ours.
_VLLMS_OWN = ("bench.vllm_api_server", "compare.vllm_parts", "compare.programs.vllm_leg")


def _is_vllms(name: str) -> bool:
    return any(name == own or name.startswith(f"{own}.") for own in _VLLMS_OWN)


def light_front_end(module: Module) -> Iterator[str]:
    """Only the engine imports torch and its kin; nobody imports vLLM, nor the programs that do."""
    for imported, line in module.imports():
        head = imported.partition(".")[0]
        if _is_vllms(own_name(imported) or "") and not _is_vllms(module.name):
            yield f"{module.name}:{line} imports {imported}, which vLLM's interpreter runs"
        if (head == "vllm" and not _is_vllms(module.name)) or (
            head in _HEAVY and module.part not in _HEAVY_HOMES
        ):
            yield f"{module.name}:{line} imports {head}"


RULES: tuple[Callable[[Module], Iterator[str]], ...] = (
    arrows,
    pure,
    async_generators,
    nurseries,
    no_hidden_cleanup,
    no_caught_cancel,
    light_front_end,
)


def import_graph(modules: list[Module]) -> dict[str, set[str]]:
    """Who imports whom when it is loaded: top-level imports without those for types alone."""
    graph: dict[str, set[str]] = {}
    for module in modules:
        loaded = [node for node in module.tree.body if not _is_type_checking(node)]
        targets = {
            own_name(name)
            for node in loaded
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for name, _ in module.imports(node)
        }
        graph[module.name] = {name for name in targets if name and name != module.name}
    return graph


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING"
