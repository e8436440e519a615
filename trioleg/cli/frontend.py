"""``trioleg-frontend``: what vLLM runs in place of its own front end.

    VLLM_USE_RUST_FRONTEND=1 VLLM_RUST_FRONTEND_PATH=$(command -v trioleg-frontend) vllm serve MODEL

vLLM starts the engines, shakes hands with them, and starts this with the descriptors of its listening sockets: one
of HTTP, and since 0.32 the two that the engines connect to, of which older ones name the addresses. From there on
it is ``trioleg serve``. Its end is never a success, whoever asked for it: vLLM takes a front end that left with
exit code 0 for one that has not, and would go on with nobody to answer.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ..errors import EngineStartError, InvalidRequestError, TriolegError
from ..frontend_settings import FrontendSettings, read_settings
from .models import make_ready
from .options import TERMINATED, log_to_stderr

if TYPE_CHECKING:
    from ..runtime.adoption import EngineLegs
    from ..server.hypercorn_config import HypercornSettings

__all__ = ["commands", "main"]

_log = logging.getLogger("trioleg.server")

_DESCRIPTOR = click.IntRange(0, 2**31 - 1)
# An engine's identity has two bytes.
_RANK = click.IntRange(0, 2**16 - 1)


@click.group()
@click.version_option(package_name="trioleg")
def commands() -> None:
    """The front end that vLLM starts in place of its own. Not for people to start."""


@commands.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--listen-fd", type=_DESCRIPTOR, required=True, help="HTTP's socket.")
@click.option("--input-listener-fd", type=_DESCRIPTOR, help="The socket that requests leave by.")
@click.option("--output-listener-fd", type=_DESCRIPTOR, help="The socket that outputs come in by.")
@click.option("--input-address", help="The same, to be bound, of vLLM before 0.32.")
@click.option("--output-address", help="The same, to be bound, of vLLM before 0.32.")
@click.option("--engine-start-index", type=_RANK, default=0, help="The first engine's rank.")
@click.option("--engine-count", type=int, default=1, help="How many engines come.")
@click.option("--data-parallel-size", type=int, default=1, help="How many there are in all.")
@click.option("--coordinator-address", help="Where the engines' loads are told.")
@click.option("--grpc-listen-fd", type=int, help="gRPC's socket.")
@click.option("--args-json", required=True, help="What `vllm serve` was asked for.")
@click.pass_context
def frontend(
    context: click.Context,
    /,
    listen_fd: int,
    input_listener_fd: int | None,
    output_listener_fd: int | None,
    input_address: str | None,
    output_address: str | None,
    engine_start_index: int,
    args_json: str,
    **of_many: Any,
) -> None:
    """Serve the engine of the `vllm serve` that starts this."""
    # Before anything else takes time: whose child we are is to be known while it is alive.
    owner = _owner()
    # Ctrl-C goes to vLLM, too, which then says SIGTERM: to hear both would be to be told to hurry.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _refuse_more_than_one(**of_many)
    settings = read_settings(_arguments(args_json), os.environ.get("VLLM_API_KEY"))
    hypercorn = _hypercorn_settings(settings, listen_fd)
    log_to_stderr(settings.log_level)
    if not settings.log_stats:
        logging.getLogger("trioleg.stats").setLevel(logging.WARNING)
    _tell_what_is_passed_over(settings, context.args)
    make_ready(settings.model, weights=False)
    _refuse_one_for_two(listen_fd, input_listener_fd, output_listener_fd)
    input_ = _leg("input", input_listener_fd, input_address)
    output = _leg("output", output_listener_fd, output_address)

    from ..runtime.adoption import EngineLegs

    _run(settings, EngineLegs(input_, output, engine_start_index, owner), hypercorn)
    sys.exit(TERMINATED)


def _owner() -> int:
    """vLLM's process: our parent, which has us in its own process group. Whoever inherits orphans has a group of his
    own, and so betrays that vLLM was gone before we could look."""
    parent = os.getppid()
    with suppress(ProcessLookupError):
        if parent and os.getpgid(parent) == os.getpgrp():
            return parent
    raise EngineStartError("there is no engine: the process that started this one is gone")


def _run(settings: FrontendSettings, legs: EngineLegs, hypercorn: HypercornSettings) -> None:
    import trio

    from ..serving import run_server

    async def run() -> None:
        await run_server(
            settings.model,
            settings.llm,
            settings.server,
            None,
            hypercorn=hypercorn,
            adopt=legs,
            stop_signals=[signal.SIGTERM],
        )

    trio.run(run)


def _refuse_more_than_one(
    engine_count: int,
    data_parallel_size: int,
    coordinator_address: str | None,
    grpc_listen_fd: int | None,
) -> None:
    if engine_count != 1 or data_parallel_size != 1 or coordinator_address is not None:
        raise InvalidRequestError(
            f"data-parallel-size is {data_parallel_size}, with {engine_count} engines for this front end; "
            "allowed: 1, since it serves one engine and no data parallel ones",
            parameter="data_parallel_size",
        )
    if grpc_listen_fd is not None:
        raise InvalidRequestError(
            "grpc-port is given; allowed: not to give it, since gRPC is not served",
            parameter="grpc_port",
        )


def _refuse_one_for_two(*descriptors: int | None) -> None:
    """Two owners of one socket: libzmq would end the process at that."""
    given = [one for one in descriptors if one is not None]
    if len(set(given)) < len(given):
        raise InvalidRequestError(
            f"the descriptors of HTTP and the two legs are {', '.join(map(str, given))}; allowed: three that differ"
        )


def _leg(name: str, descriptor: int | None, address: str | None) -> int | str:
    if descriptor is None and address is None:
        raise InvalidRequestError(
            f"there is no {name} leg; allowed: --{name}-listener-fd, as vLLM has it since 0.32, or "
            f"--{name}-address, as before"
        )
    return address or "" if descriptor is None else descriptor


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"args-json is no JSON: {error}", parameter="args_json") from None
    if not isinstance(found, dict):
        raise InvalidRequestError("args-json is no object; allowed: one", parameter="args_json")
    return found


def _hypercorn_settings(settings: FrontendSettings, listen_fd: int) -> HypercornSettings:
    from hypercorn import Config

    from ..server.hypercorn_config import FD, HypercornSettings

    config = Config()
    for name, value in settings.hypercorn.items():
        setattr(config, name, value)
    config.bind = [f"{FD}{listen_fd}"]
    return HypercornSettings.of(config)


def _tell_what_is_passed_over(settings: FrontendSettings, unknown: list[str]) -> None:
    if settings.of_the_engine:
        _log.info("left to the engine: %s", ", ".join(settings.of_the_engine))
    if unknown:
        _log.info("not known to this front end, and passed over: %s", " ".join(unknown))


def main() -> None:
    """The console script's entry; leaves by ``SystemExit``."""
    try:
        commands(prog_name="trioleg-frontend")
    except TriolegError as error:
        click.echo(f"trioleg-frontend: {' '.join(str(error).split())}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
