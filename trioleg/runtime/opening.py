"""``open_llm``: the block in which a model is served.

The order of its end: no new requests, live streams end (each with its ABORT), sockets close when what was sent
is out, the engine's process is asked to leave, and killed if it does not. Which of several errors leaves the
block: see ``unwrap.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from .. import model_store
from ..config import LLMConfig
from ..errors import EngineDeadError, InvalidRequestError
from ..tokenizer import Tokenizer
from .adoption import EngineLegs, adopt_engine
from .engines import OpenEngine, listen_for_engines, start_engine, start_vllm_engine
from .llm import LLM
from .unwrap import unwrapped

__all__ = ["open_llm", "running"]


@asynccontextmanager
async def open_llm(
    model: str | Path = model_store.DEFAULT_MODEL,
    config: LLMConfig | None = None,
    *,
    attach: str | None = None,
    script: Path | None = None,
    adopt: EngineLegs | None = None,
    cancel_on_death: bool = False,
    wait_until_ready: bool = True,
) -> AsyncIterator[LLM]:
    """Start an engine for ``model`` (or let one join) and yield an ``LLM`` when it is ready.

    ``model``: what ``model_store.resolve`` finds: a model or GGUF file that was pulled, or a directory. The engine
    is our own, or, with ``LLMConfig.vllm``, a stock one of vLLM's.
    ``attach``: a handshake address (``tcp://127.0.0.1:PORT``) to bind; an engine started by somebody
    else is waited for there. One that other machines can reach needs ``LLMConfig.curve_keys``, or
    ``LLMConfig.allow_unauthenticated``. ``script``: the engine is the scripted one, with this file.
    ``adopt``: the engine was started by the vLLM that started us (``adoption.py``). With any of these three, a
    directory needs no weights.
    ``wait_until_ready`` False: yield at once; until ``LLM.wait_ready`` returns, requests are refused with
    ``EngineUnavailableError``, and an engine that does not start cancels the body.

    Raises ``ModelStoreError``, ``EngineStartError``, and ``InvalidRequestError`` for settings that do not go
    together. If the engine dies, live streams end with ``EngineDeadError`` and the body goes on (see
    ``LLM.wait_dead``), or, with ``cancel_on_death``, is cancelled; after a body that left without an error,
    ``EngineDeadError`` is raised with the cause. With ``LLMConfig.restart_engine`` that is so only for the last of
    them: another engine follows one that died.
    What the body raises leaves as itself. Everything that was started is ended on the way out.
    """
    config = config or LLMConfig()
    _check_together(config, attach)
    is_ours = attach is None and script is None and adopt is None
    resolve = partial(model_store.resolve, str(model), weights=is_ours)
    directory = await trio.to_thread.run_sync(resolve)
    tokenizer = await trio.to_thread.run_sync(Tokenizer.from_directory, directory)
    if config.generation_config == "vllm":
        tokenizer = replace(tokenizer, generation_defaults={})
    async with _opening(directory, config, attach, script, adopt) as open_engine:
        llm = LLM(str(model), tokenizer, open_engine, config)
        async with running(llm, cancel_on_death=cancel_on_death, wait_until_ready=wait_until_ready):
            yield llm
    if llm.cause_of_death is not None:
        raise EngineDeadError(llm.cause_of_death)


def _check_together(config: LLMConfig, attach: str | None) -> None:
    """Settings of an engine that joins, and of one that is started, exclude each other."""
    if attach is not None and config.vllm is not None:
        raise InvalidRequestError(
            "attach and LLMConfig.vllm are given; allowed: one of them, since an engine that joins is started by "
            "somebody else",
            parameter="attach",
        )
    for name in ("curve_keys", "allow_unauthenticated"):
        if attach is None and (value := getattr(config, name)):
            raise InvalidRequestError(
                f"{name} is {value!s}; allowed: only with attach, for an engine that joins by itself. One that is "
                "started here talks over sockets in a private folder, and vLLM's own cannot use keys",
                parameter=name,
            )


def _opening(
    directory: Path,
    config: LLMConfig,
    attach: str | None,
    script: Path | None,
    adopt: EngineLegs | None,
) -> AbstractAsyncContextManager[OpenEngine]:
    """Where engines come from, one after the other."""
    if adopt is not None:
        return nullcontext(partial(adopt_engine, adopt, config.start_timeout))
    if attach is not None:
        return listen_for_engines(attach, config)
    if config.vllm is not None and script is None:
        return nullcontext(partial(start_vllm_engine, directory, config))
    return nullcontext(partial(start_engine, directory, config, script=script))


@asynccontextmanager
async def running(
    llm: LLM, *, cancel_on_death: bool = False, wait_until_ready: bool = True
) -> AsyncIterator[None]:
    """Run ``llm`` while the body runs; see ``open_llm``, of which this is what does not depend on the engine."""
    with unwrapped() as body:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.run, name="LLM")
            if cancel_on_death:
                nursery.start_soon(_cancel_on_death, llm, nursery.cancel_scope)
            try:
                if wait_until_ready:
                    await llm.wait_ready()
                yield
            except BaseException as error:
                body.error = error
                raise
            finally:
                llm.close()
                nursery.cancel_scope.cancel(reason="the LLM's block has been left")


async def _cancel_on_death(llm: LLM, scope: trio.CancelScope) -> None:
    # Closed: the block is being left, alive.
    with suppress(trio.ClosedResourceError):
        scope.cancel(reason=await llm.wait_dead())
