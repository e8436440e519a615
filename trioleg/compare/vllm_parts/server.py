"""vLLM's API server as ``vllm serve`` runs it with one process: uvloop, its own signals, watchdog and exit codes."""

from __future__ import annotations

from typing import Any

from ..programs.arguments import MODEL, Arguments
from .options import flags
from .watching import Watching

__all__ = ["serve"]

# What the puppet can be asked for; longer than the models were trained for, which is no concern of a script.
MAX_MODEL_LEN = 2**17


def serve(arguments: Arguments, watching: Watching) -> None:
    """Until it is told to leave, or its engine has gone. Raises what vLLM raises."""
    import uvloop
    from vllm.entrypoints.launchers.api_server import entry

    serve_engine = entry.build_and_serve

    async def build_and_serve(engine_client: Any, *rest: Any, **more: Any) -> Any:
        watching.take_front_end(engine_client)
        return await serve_engine(engine_client, *rest, **more)

    entry.build_and_serve = build_and_serve

    async def run() -> None:
        with watching.loop():
            await entry.run_server(_settings(arguments))

    uvloop.run(run())


def _settings(arguments: Arguments) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser())
    settings = parser.parse_args(
        [
            *("--model", str(arguments.directory), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(arguments.port)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--uvicorn-log-level", "warning"),
            *flags(arguments.options),
        ]
    )
    validate_parsed_serve_args(settings)
    return settings
