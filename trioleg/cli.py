"""The command line: ``trioleg serve``, ``engine``, ``chat``, ``batch``, ``trace``, ``pull``, ``models``, ``bench``.

Rules of this file: at the top only what is light. A command imports what it runs on when it runs, so
that ``--help`` answers at once and no command loads another's weight. stdout is for what a command was
asked for, stderr for all else; an error of ours is one line there and exit code 1.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from . import model_store
from .config import (
    DETOKENIZERS,
    DTYPES,
    SCHEDULING_POLICIES,
    EngineConfig,
    LLMConfig,
    ServerConfig,
)
from .errors import TriolegError
from .timeouts import Timeouts

if TYPE_CHECKING:
    from rich.console import Console

    from .engine.interface import Core

__all__ = ["commands", "main"]

_ENGINE = EngineConfig()
_SERVER = ServerConfig()

# As a shell has it: 128 + SIGINT. For a talk that never began; one that is left has done its work, with 0.
# And for a batch that has not ended.
_INTERRUPTED = 130
_TERMINATED = 143

# Of a table that goes into a file or a pipe: wide enough for every column.
_PLAIN_WIDTH = 150

_Command = TypeVar("_Command", bound=Callable[..., Any])


def main() -> None:
    """The console script's entry; leaves by ``SystemExit``."""
    try:
        commands(prog_name="trioleg")
    except TriolegError as error:
        click.echo(f"trioleg: {' '.join(str(error).split())}", err=True)
        sys.exit(1)


@click.group()
@click.version_option(package_name="trioleg")
def commands() -> None:
    """An LLM server whose return leg, from sampled token to data: line, is a tree of Trio nurseries.

    \b
    Example:
      trioleg serve
    """


def _engine_options(command: _Command) -> _Command:
    """How the torch engine is set up; names and meanings are vLLM's."""
    options = (
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            default=_ENGINE.dtype,
            show_default=True,
            help="Number format of the weights; auto is the checkpoint's own.",
        ),
        click.option(
            "--device",
            default=_ENGINE.device,
            show_default=True,
            help="A torch device, such as cpu or cuda:0; auto takes a GPU if there is one.",
        ),
        click.option(
            "--max-model-len",
            type=int,
            help="Longest prompt and answer together, in tokens; by default the model's own.",
        ),
        click.option(
            "--max-num-seqs",
            type=int,
            default=_ENGINE.max_num_seqs,
            show_default=True,
            help="Requests that run at once; more wait.",
        ),
        click.option(
            "--max-num-batched-tokens",
            type=int,
            default=_ENGINE.max_num_batched_tokens,
            show_default=True,
            help="Tokens of one step, chunks of prompts included.",
        ),
        click.option(
            "--max-logprobs",
            type=int,
            default=_ENGINE.max_logprobs,
            show_default=True,
            help="Most probable tokens that a request may ask for at each position; -1: no bound.",
        ),
        click.option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            default=_ENGINE.enable_prefix_caching,
            show_default=True,
            help="Keep what finished requests computed, for prompts that begin alike.",
        ),
        click.option(
            "--scheduling-policy",
            type=click.Choice(SCHEDULING_POLICIES),
            default=_ENGINE.scheduling_policy,
            show_default=True,
            help="Who is served first; with priority, requests may name one, and the smallest wins.",
        ),
        click.option(
            "--num-gpu-blocks-override",
            type=int,
            metavar="BLOCKS",
            help="Size of the key/value cache, on any device; by default what memory allows.",
        ),
        click.option(
            "--torch-profiler-dir",
            type=click.Path(path_type=Path, file_okay=False),
            help="Lets torch's profiler be turned on by name, and its traces go there.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@commands.command(short_help="Serve a model over HTTP.")
@click.argument("model", default=model_store.DEFAULT_MODEL)
@click.option("--host", default=_SERVER.host, show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_SERVER.port,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--served-model-name", metavar="NAME", help="The model's name in the API.")
@_engine_options
@click.option(
    "--attach",
    metavar="ADDRESS",
    help="Wait at tcp://127.0.0.1:PORT (or ipc://PATH) for an engine that somebody else starts.",
)
@click.option(
    "--stream-interval",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Streams get an output only every that many tokens; the first and the last at once.",
)
@click.option(
    "--detokenizer",
    type=click.Choice(DETOKENIZERS),
    default=DETOKENIZERS[0],
    show_default=True,
    help="Which of the two implementations decodes.",
)
@click.option(
    "--sse-keep-alive",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Write a comment into a stream after so much silence, for proxies that would cut it.",
)
@click.option(
    "--first-token-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End a request that has no token by then, unless it names a time of its own.",
)
@click.option(
    "--total-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End a request that is not complete by then, unless it names a time of its own.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=LLMConfig().start_timeout,
    show_default=True,
    metavar="SECONDS",
    help="Give an engine up that is not ready by then.",
)
@click.option(
    "--restart-engine",
    is_flag=True,
    help="Start the engine again when it has died; requests get 503 and Retry-After meanwhile.",
)
@click.option(
    "--max-engine-restarts",
    type=click.IntRange(min=1),
    default=LLMConfig().max_engine_restarts,
    show_default=True,
    help="End the server when the engine dies once more than that in a row.",
)
@click.option(
    "--log-level",
    type=click.Choice(("debug", "info", "warning", "error")),
    default="info",
    show_default=True,
    help="What goes to stderr; at info, a line for each request's ending and, every 10 s, the load.",
)
@click.pass_context
def serve(
    context: click.Context,
    /,
    model: str,
    host: str,
    port: int,
    served_model_name: str | None,
    attach: str | None,
    stream_interval: int,
    detokenizer: str,
    sse_keep_alive: float | None,
    first_token_timeout: float | None,
    total_timeout: float | None,
    start_timeout: float,
    restart_engine: bool,
    max_engine_restarts: int,
    log_level: str,
    **engine: Any,
) -> None:
    """Serve MODEL over HTTP, as OpenAI's API: a name that `trioleg models` lists, a Hugging Face
    directory, a GGUF file, or OWNER/NAME on the hub; fetched or converted if it has not been yet.

    Prints one ready line and a curl line to try. SIGINT and SIGTERM end it in good order, with exit
    code 0; a second one does not wait. If the engine dies, requests get 503 for ten seconds, then it ends with
    exit code 1, unless --restart-engine starts another.

    \b
    Example:
      trioleg serve smollm2-135m --port 9000
    With an engine of vLLM's, started on its own:
      trioleg serve ./model --attach tcp://127.0.0.1:29550
      vllm serve ./model --headless --data-parallel-address 127.0.0.1 \\
          --data-parallel-rpc-port 29550
    """
    if attach is not None:
        _refuse_engine_options(context, engine)
    hear = _leave_at_signals()
    llm_config = LLMConfig(
        engine=EngineConfig(**engine),
        stream_interval=stream_interval,
        detokenizer=detokenizer,
        timeouts=Timeouts(first_token=first_token_timeout, total=total_timeout),
        start_timeout=start_timeout,
        restart_engine=restart_engine,
        max_engine_restarts=max_engine_restarts,
    )
    server_config = ServerConfig(
        host=host,
        port=port,
        served_model_name=served_model_name,
        sse_keep_alive_interval=sse_keep_alive,
    )
    _make_ready(model, weights=attach is None)

    _log_to_stderr(log_level)

    import trio

    from .serving import run_server

    try:
        trio.run(run_server, model, llm_config, server_config, attach, hear)
    finally:
        # Python gives signals their default back while it shuts down, but not those that are ignored.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _leave_at_signals() -> Callable[[], None]:
    """What SIGINT and SIGTERM do while no receiver of Trio's hears them.

    Before it does (a model is being fetched) they end the program, in good order: exit code 0. Once
    it has (the function returned is called then), the program is ending anyway: nothing.
    """
    heard = False

    def hear() -> None:
        nonlocal heard
        heard = True

    def leave(_number: int, _frame: object) -> None:
        if not heard:
            hear()
            raise SystemExit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    return hear


def _log_to_stderr(
    level: str, *, form: str = "%(asctime)s %(levelname)s %(name)s: %(message)s"
) -> None:
    """Our own lines from ``level`` on (each request's ending is one); of libraries only warnings."""
    logging.basicConfig(format=form)
    logging.getLogger("trioleg").setLevel(level.upper())


# What the front end must know of an engine that somebody else starts, to refuse what it would not take.
_ALSO_OF_THE_FRONT_END = ("max_logprobs", "scheduling_policy")


def _refuse_engine_options(context: click.Context, engine: dict[str, Any]) -> None:
    for name in engine:
        if name in _ALSO_OF_THE_FRONT_END:
            continue
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{option} is for an engine that we start; with --attach give it to the engine itself"
            )


@commands.command(short_help="Run an engine alone, for a front end in another process.")
@click.argument("model", required=False)
@click.option(
    "--handshake",
    metavar="ADDRESS",
    required=True,
    help="Where the front end waits for engines, such as tcp://127.0.0.1:29550.",
)
@click.option(
    "--script",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Play this JSON file in place of a model: tokens, pace and faults as it says.",
)
@_engine_options
def engine(model: str | None, handshake: str, script: Path | None, **settings: Any) -> None:
    """Run the engine of MODEL alone, for a front end on the same engine-core wire (ours or vLLM's).

    \b
    Example:
      trioleg engine smollm2-135m --handshake tcp://127.0.0.1:29550
    """
    if (model is None) == (script is None):
        raise click.UsageError("give either MODEL or --script")
    make_core = _scripted(script) if script else _torch(model or "", EngineConfig(**settings))
    # Sentences alone: a front end that started us puts the time before them.
    _log_to_stderr("info", form="%(message)s")

    import trio

    from .engine.process import run_engine

    code = trio.run(run_engine, make_core, handshake)
    # A model that was still loading goes on in its thread, and C++ aborts loudly if the interpreter is
    # taken down under it. All that had to be delivered has been.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _scripted(script: Path) -> Callable[[], Core]:
    from .engine.scripted import load_script, start_scripted_core

    return functools.partial(start_scripted_core, load_script(script))


def _torch(model: str, config: EngineConfig) -> Callable[[], Core]:
    """Only the files are seen to now: torch and the weights load once the front end knows of us."""
    directory = _make_ready(model)

    def load() -> Core:
        try:
            from .engine.core import EngineCore
        except ModuleNotFoundError as error:
            raise TriolegError(
                f"our engine needs {error.name}: pip install 'trioleg[engine]'"
            ) from error
        return EngineCore.load(directory, config)

    return load


@commands.command(short_help="Answer a file of requests.")
@click.argument("in", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--model",
    default=model_store.DEFAULT_MODEL,
    show_default=True,
    help="As for serve: a name, a directory, a GGUF file, or OWNER/NAME on the hub.",
)
@click.option("--served-model-name", metavar="NAME", help="The model's name in the requests.")
@_engine_options
def batch(model: str, out: Path, served_model_name: str | None, **settings: Any) -> None:
    """Answer the requests in IN, in this process, and write the answers to OUT, both in OpenAI's batch
    format: a JSON object a line, told apart by custom_id.

    An answer is written as soon as it is finished. If OUT has answers, the others are added: an
    interrupted run goes on where it stopped. To ask again what ended in an error, delete its line.

    Exit code 0: every request has its answer, be it an error of its own. 1: IN, OUT or the model cannot
    be used; the message names file and line. 130, 143: SIGINT, SIGTERM.

    \b
    Example:
      trioleg batch questions.jsonl answers.jsonl --model smollm2-135m
    with lines such as
      {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
       "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}}
    """
    # Not the default, which would leave a terminal without its cursor.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    questions = settings.pop("in")
    config = LLMConfig(engine=EngineConfig(**settings))
    try:
        from .batch import run

        # Before OUT is made: a wrong name leaves nothing behind.
        _make_ready(model)
        run(model, questions, out, config, served_model_name)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


@commands.command(short_help="Fetch or convert a model.")
@click.argument("name")
def pull(name: str) -> None:
    """Fetch the model NAME, unless it is there: one that `trioleg models` lists, or OWNER/NAME (or
    OWNER/NAME@REVISION) on the Hugging Face hub. Or convert NAME, a GGUF file of your own.

    \b
    Example:
      trioleg pull smollm2-135m
      trioleg pull Qwen/Qwen3-0.6B
      trioleg pull ./model.Q8_0.gguf
    """
    try:
        directory = _pull(name)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    click.echo(f"{name} is in {directory}", err=True)


def _make_ready(model: str, *, weights: bool = True) -> Path:
    """The model's directory, pulled if it is missing. With ``weights``, which our engine is to compute, it
    is one that it can: that takes no torch to see, and loading torch takes seconds."""
    if model_store.is_missing(model, weights=weights):
        _pull(model)
    directory = model_store.resolve(model, weights=weights)
    if weights:
        from .engine.model_config import read_model_config

        read_model_config(directory)
    return directory


def _pull(name: str) -> Path:
    from .pull_bar import PullBar

    with _in_order_at_sigterm(), PullBar(name) as bar:
        return model_store.pull(name, progress=bar)


@contextmanager
def _in_order_at_sigterm() -> Iterator[None]:
    """Within, SIGTERM leaves by an exception, so that a download's process and half-made folders go too.

    A handler that is there already (``serve``'s, ``batch``'s) does as much, and stays.
    """

    def leave(number: int, _frame: object) -> None:
        # Only once: a second signal must not end the cleaning up.
        signal.signal(number, signal.SIG_IGN)
        sys.exit(_TERMINATED)

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@commands.command(short_help="List the models with names.")
@click.option("--path", "name", metavar="NAME", help="Print only the directory of this model.")
def models(name: str | None) -> None:
    """List the models that can be named, and whether they are here.

    \b
    Example:
      trioleg models --path smollm2-135m
    """
    if name is not None:
        click.echo(model_store.resolve(name))
        return
    rows = [(one.name, _state(one), str(one.path)) for one in model_store.known_models()]
    if sys.stdout.isatty():
        _show_table(rows)
    else:
        click.echo("\n".join("\t".join(row) for row in rows))


def _state(model: model_store.StoredModel) -> str:
    if model.present:
        return f"here, {model.size / 1e6:.0f} MB"
    return f"not here, {model.download_size / 1e6:.0f} MB to fetch"


def _show_table(rows: list[tuple[str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "state", "directory")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@commands.command(short_help="Show one request hop by hop, token by token.")
@click.argument("prompt", required=False)
@click.option(
    "--model",
    default=model_store.DEFAULT_MODEL,
    show_default=True,
    help="As for serve: a name, a directory, a GGUF file, or OWNER/NAME on the hub.",
)
@click.option(
    "--ids",
    metavar="1,2,3",
    help="No model: a scripted engine says these tokens, one a step; MODEL needs only its tokenizer.",
)
@click.option("--max-tokens", type=int, help="Longest answer; by default 16, or all of --ids.")
@click.option("--stop", multiple=True, metavar="TEXT", help="A stop string; may be given again.")
@click.option("--stream-interval", type=int, help="A frame only every that many tokens.")
@click.option(
    "--detokenizer",
    type=click.Choice(DETOKENIZERS),
    default=DETOKENIZERS[0],
    show_default=True,
    help="Which of the two implementations decodes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the tables.")
def trace(
    prompt: str | None,
    model: str,
    ids: str | None,
    max_tokens: int | None,
    stop: tuple[str, ...],
    stream_interval: int | None,
    detokenizer: str,
    as_json: bool,
) -> None:
    """Serve one greedy request for PROMPT and show the way of every token: when it passed each hop, the
    frame that carried it, and what was held back and why. Exit code 1 if it ended in an error.

    \b
    Example:
      trioleg trace "What is the capital of France?"
      trioleg trace --ids 391,10813,230,131 --stop "!"
    """
    if (prompt is None) == (ids is None):
        raise click.UsageError("give either PROMPT or --ids")
    from .sampling_params import SamplingParams

    token_ids = None if ids is None else _parse_ids(ids)
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens or (16 if token_ids is None else len(token_ids)),
        stop=stop,
        stream_interval=stream_interval,
    )
    _make_ready(model, weights=ids is None)

    import trio

    from .trace import trace_request
    from .trace_table import show_trace

    config = LLMConfig(detokenizer=detokenizer)
    made = trio.run(
        functools.partial(trace_request, token_ids=token_ids), model, prompt, params, config
    )
    if as_json:
        click.echo(made.to_json())
    else:
        show_trace(made, _console())
    if any(frame.kind == "error" for frame in made.frames):
        sys.exit(1)


def _parse_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    # No vocabulary has more ids than int32; what this one does not have is the trace's to show.
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise click.UsageError(f"--ids is {text!r}; allowed: token ids with commas, such as 1,2,3")
    return [int(part) for part in parts]


@commands.command(short_help="Talk with a model in the terminal.")
@click.argument("model", required=False)
@click.option(
    "--url",
    help="The server to talk to, with or without /v1; by default one on this machine, else a new one.",
)
@click.option("--model", "name", metavar="NAME", help="Which of the server's models to ask.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option(
    "--temperature",
    type=float,
    # Not the API's 1, at which a small model, such as our default one, strays into nonsense.
    default=0.0,
    show_default=True,
    help="0 is greedy; 1 samples as the model predicts, which a small one does badly.",
)
@click.option(
    "--top-p",
    type=float,
    help="At a temperature above 0: sample among the tokens that make up this much.",
)
@click.option("--max-tokens", type=int, help="Longest answer, in tokens.")
@click.option("--seed", type=int, help="At a temperature above 0: the same seed, the same answer.")
def chat(
    model: str | None, url: str | None, name: str | None, system: str | None, **sampling: Any
) -> None:
    """Talk in the terminal: with the server at --url, else with one at http://127.0.0.1:8000 if it has
    MODEL, else with one that is started for this talk.

    Ctrl-C ends an answer (and aborts it in the engine), a second one leaves.

    \b
    Example:
      trioleg chat --temperature 0.7
      trioleg chat --url http://127.0.0.1:9000/v1 --system "Answer in one sentence."
    """
    from .chat import run

    if url is not None and model is not None:
        raise click.UsageError("MODEL is for a server that is started here; with --url use --model")
    try:
        went_well = run(
            model,
            url,
            default_model=model_store.DEFAULT_MODEL,
            name=name,
            system=system,
            sampling={key: value for key, value in sampling.items() if value is not None},
        )
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    sys.exit(0 if went_well else 1)


@commands.group(short_help="Measure what endings cost.")
def bench() -> None:
    """Measure the way between engine and client from outside, with real processes and the scripted engine.

    \b
    Example:
      trioleg bench endings --only disconnect
    """


_bench_model = click.option(
    "--model",
    default=model_store.DEFAULT_MODEL,
    show_default=True,
    help="As for serve; only its tokenizer is needed.",
)
_bench_json = click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")
_ENDINGS = ("disconnect", "kill-engine", "stop-engine", "kill-front-end")


@bench.command(short_help="How fast they hear of it who must.")
@click.option(
    "--tries",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Kills and stops of each kind; disconnects, which are quick, ten times as many.",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(_ENDINGS),
    help="Only this; may be given again. By default all, which takes minutes.",
)
@_bench_model
@_bench_json
def endings(tries: int, only: tuple[str, ...], model: str, as_json: bool) -> None:
    """Measure how long it takes from what ends requests to those who must hear of it.

    A client that leaves until the engine has the ABORT; an engine that is killed until its last client has
    been told, or stopped until /health says so; a front end that is killed until its engine is gone.

    \b
    Example:
      trioleg bench endings --tries 5 --only kill-engine --only stop-engine
    """
    import msgspec

    from .bench.endings import measure_endings
    from .bench.measurement import show_measurements

    measured = _run_bench(model, measure_endings, tries, only, _tell)
    if as_json:
        click.echo(msgspec.json.encode([one.summary() for one in measured]))
    else:
        show_measurements(measured, _console())


@bench.command(short_help="Many clients that leave, engines that die.")
@click.option("--requests", type=click.IntRange(min=1), default=20_000, show_default=True)
@click.option(
    "--clients", type=click.IntRange(min=1), default=64, show_default=True, help="At a time."
)
@click.option(
    "--kills",
    type=click.IntRange(min=0, max=LLMConfig().max_engine_restarts),
    default=3,
    show_default=True,
    help="Engines that are killed in between.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of who leaves when.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop by then, whatever has been done.",
)
@_bench_model
@_bench_json
def churn(model: str, as_json: bool, **settings: Any) -> None:
    """Let clients come and leave at random points, kill engines meanwhile, and see that nothing is left.

    Prints how the requests ended and what memory, descriptors and states the server has then. Exit code 1
    if a request ended in a way that it must not, or if something is left.

    \b
    Example:
      trioleg bench churn --requests 2000 --kills 1
    """
    import msgspec

    from .bench.churn import Churn, run_churn, show_churn

    asked = Churn(**settings)
    report = _run_bench(model, run_churn, asked, _tell)
    if as_json:
        click.echo(msgspec.json.encode(report.summary()))
    else:
        show_churn(report, _console())
    if faults := report.faults(asked):
        raise TriolegError("; ".join(faults))


def _run_bench(model: str, measure: Callable[..., Any], *arguments: Any) -> Any:
    """What ``measure`` returns. SIGTERM is as good as Ctrl-C: every program ends, then this one does."""
    import trio

    _make_ready(model, weights=False)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return trio.run(measure, model, *arguments)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
