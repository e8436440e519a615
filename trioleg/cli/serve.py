"""``trioleg serve``."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import model_store
from ..config import DETOKENIZERS, LLMConfig, ServerConfig
from ..errors import InvalidRequestError
from ..lora import LoRAModulePath
from ..timeouts import Timeouts
from .engine_choice import check_engine_choice, engine_config, vllm_config
from .group import commands
from .lora_modules import LoRAModulesCommand, lora_modules_option
from .models import make_ready
from .options import engine_options, log_to_stderr

if TYPE_CHECKING:
    from ..server.hypercorn_config import HypercornSettings

__all__ = ["serve"]

_SERVER = ServerConfig()
_LLM = LLMConfig()


@commands.command(short_help="Serve a model over HTTP.", cls=LoRAModulesCommand)
@click.argument("model", default=model_store.DEFAULT_MODEL)
@click.argument("vllm_flags", nargs=-1, metavar="[-- VLLM_FLAGS]...", type=click.UNPROCESSED)
@click.option("--host", default=_SERVER.host, show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_SERVER.port,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A configuration file of Hypercorn's, .toml or .py: TLS, Unix sockets, several addresses.",
)
@click.option("--served-model-name", metavar="NAME", help="The model's name in the API.")
@engine_options
@click.option(
    "--engine",
    "engine_kind",
    type=click.Choice(("torch", "vllm")),
    default="torch",
    show_default=True,
    help="Whose engine is started: our own, or a stock one of vLLM's, with the flags behind `--`.",
)
@click.option(
    "--vllm-python",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="An interpreter whose environment has vLLM, if this one has not, nor the PATH a `vllm`.",
)
@click.option(
    "--attach",
    metavar="ADDRESS",
    help="Wait at tcp://127.0.0.1:PORT (or ipc://PATH) for an engine that somebody else starts.",
)
@click.option(
    "--curve-keys",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="With --attach: let only our engines in that have a key of those that `trioleg keys` made.",
)
@click.option(
    "--allow-unauthenticated",
    is_flag=True,
    help="With --attach: the address may be one that other machines reach, without any keys.",
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
    default=_LLM.start_timeout,
    show_default=True,
    metavar="SECONDS",
    help="Give an engine up that is not ready by then.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    default=_SERVER.drain_timeout,
    show_default=True,
    metavar="SECONDS",
    help="After a signal, let running requests go on for so long; new ones get 503.",
)
@click.option(
    "--write-timeout",
    type=click.FloatRange(min=0),
    default=_SERVER.write_timeout,
    show_default=True,
    metavar="SECONDS",
    help="Close the connection of a client that has read nothing for so long, and end its request.",
)
@click.option(
    "--max-inflight-requests",
    type=click.IntRange(min=1),
    default=_LLM.max_inflight_requests,
    show_default=True,
    help="Answer 429 when so many requests have begun and not ended; n choices count n.",
)
@click.option(
    "--max-queued-prompt-tokens",
    type=click.IntRange(min=1),
    default=_LLM.max_queued_prompt_tokens,
    show_default=True,
    help="Answer 429 when prompts of so many tokens wait for their first token.",
)
@click.option(
    "--restart-engine",
    is_flag=True,
    help="Start the engine again when it has died; requests get 503 and Retry-After meanwhile.",
)
@click.option(
    "--max-engine-restarts",
    type=click.IntRange(min=1),
    default=_LLM.max_engine_restarts,
    show_default=True,
    help="End the server when the engine dies once more than that in a row.",
)
@lora_modules_option
@click.option(
    "--enable-engine-controls",
    is_flag=True,
    help="Serve /sleep, /wake_up, /pause, /reset_prefix_cache, /v1/load_lora_adapter …, as vLLM does, to whoever "
    "reaches the port.",
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
    vllm_flags: tuple[str, ...],
    host: str,
    port: int,
    config_file: Path | None,
    served_model_name: str | None,
    engine_kind: str,
    vllm_python: Path | None,
    attach: str | None,
    stream_interval: int,
    detokenizer: str,
    sse_keep_alive: float | None,
    first_token_timeout: float | None,
    total_timeout: float | None,
    start_timeout: float,
    drain_timeout: float,
    write_timeout: float,
    max_inflight_requests: int,
    max_queued_prompt_tokens: int,
    curve_keys: Path | None,
    allow_unauthenticated: bool,
    restart_engine: bool,
    max_engine_restarts: int,
    lora_modules: tuple[LoRAModulePath, ...],
    enable_engine_controls: bool,
    log_level: str,
    **engine: Any,
) -> None:
    """Serve MODEL over HTTP, as OpenAI's API: a name that `trioleg models` lists, a Hugging Face
    directory, a GGUF file, or OWNER/NAME on the hub; fetched or converted if it has not been yet.

    Prints one ready line and a curl line to try. SIGINT and SIGTERM end it in good order, with exit code 0: running
    requests go on for --drain-timeout at most, new ones get 503; a second one does not wait. If the engine dies,
    requests get 503 for ten seconds, then it ends with exit code 1, unless --restart-engine starts another.

    \b
    Example:
      trioleg serve smollm2-135m --port 9000
    With an engine of vLLM's, which this command starts and ends:
      trioleg serve ./model --engine vllm -- --tensor-parallel-size 2
    With one that is started on its own:
      trioleg serve ./model --attach tcp://127.0.0.1:29550
      vllm serve ./model --headless --data-parallel-address 127.0.0.1 \\
          --data-parallel-rpc-port 29550
    """
    check_engine_choice(context, engine)
    vllm = None
    if engine_kind == "vllm":
        vllm = vllm_config(context, engine, vllm_python, vllm_flags)
    hypercorn = _hypercorn_settings(context, config_file)
    hear = _leave_at_signals()
    llm_config = LLMConfig(
        engine=engine_config(engine, vllm),
        vllm=vllm,
        stream_interval=stream_interval,
        detokenizer=detokenizer,
        timeouts=Timeouts(first_token=first_token_timeout, total=total_timeout),
        start_timeout=start_timeout,
        max_inflight_requests=max_inflight_requests,
        max_queued_prompt_tokens=max_queued_prompt_tokens,
        restart_engine=restart_engine,
        max_engine_restarts=max_engine_restarts,
        curve_keys=curve_keys,
        allow_unauthenticated=allow_unauthenticated,
        lora_modules=lora_modules,
    )
    server_config = ServerConfig(
        host=host,
        port=port,
        served_model_name=served_model_name,
        sse_keep_alive_interval=sse_keep_alive,
        drain_timeout=drain_timeout,
        write_timeout=write_timeout,
        enable_engine_controls=enable_engine_controls,
    )
    make_ready(model, weights=attach is None, ours=vllm is None)

    log_to_stderr(log_level)

    import trio

    from ..serving import run_server

    try:
        trio.run(run_server, model, llm_config, server_config, attach, hear, hypercorn)
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


def _hypercorn_settings(context: click.Context, file: Path | None) -> HypercornSettings | None:
    if file is None:
        return None
    from ..server.hypercorn_config import HypercornSettings, read_hypercorn_config

    try:
        settings = HypercornSettings.of(read_hypercorn_config(file))
    except InvalidRequestError as error:
        # Those that are about the file as a whole name it themselves.
        where = "" if error.parameter is None else f"{file}: "
        raise click.UsageError(f"{where}{error}") from None
    for name in ("host", "port"):
        is_given = context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        if settings.bind is not None and is_given:
            raise click.UsageError(
                f"--{name} and the bind of {file} both say where to listen; allowed: one of them"
            )
    return settings
