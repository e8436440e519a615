"""Events that meet: two rules about one engine, half a request, an end in the middle of a question."""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import pytest
import trio
from scripted_llm import PROMPT, aborted, added, open_scripted, script
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg import (
    EngineDeadError,
    EngineStartError,
    EngineUnavailableError,
    InvalidRequestError,
    LLMConfig,
    LLMState,
    SamplingParams,
    ServerConfig,
    ServerShutdown,
)
from trioleg.ipc import sockets
from trioleg.ipc.handshake import listen_for_engine
from trioleg.ipc.transport import ZmqTransport
from trioleg.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType
from trioleg.output.processor import OutputProcessor
from trioleg.runtime import outbox
from trioleg.testing import ScriptedTransport

WORDS = script(*"abcabccbac", step=0.1, finish="length")
HANGS = script(*"abcabccbac", faults=[{"after_steps": 1, "how": "hang"}])
MANY = SamplingParams(max_tokens=100)


async def test_a_hung_engine_is_not_ready_because_its_connection_is(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted(HANGS, LLMConfig(frozen_timeout=60)) as (llm, transport):
        with pytest.raises(EngineDeadError, match="makes no step"):
            await llm.generate(PROMPT, MANY)
        transport.break_outputs()
        await trio.sleep(0.5)
        assert llm.health().state is LLMState.FROZEN
        with pytest.raises(EngineUnavailableError, match="makes no step"):
            await llm.generate(PROMPT, MANY)
        cause = await llm.wait_dead()
        assert "makes no step and answers nothing, and was given up after 60 s more" in cause


async def test_half_a_request_is_taken_back_and_ends(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost between two choices' ADDs. The engine may not get an id twice, so the request
    ends; its reader has seen nothing."""
    async with open_scripted(WORDS) as (llm, transport):
        send, adds = transport.send, 0

        def fail_in_the_middle(kind: EngineCoreRequestType, body: bytes) -> bool:
            nonlocal adds
            adds += kind is EngineCoreRequestType.ADD
            if adds == 2:
                transport.refuse_sends()
                adds += 1
            return send(kind, body)

        monkeypatch.setattr(transport, "send", fail_in_the_middle)
        with pytest.raises(EngineDeadError, match="may be lost") as caught:
            await llm.generate(PROMPT, SamplingParams(n=3, max_tokens=100))
        assert caught.value.partial is None
        transport.refuse_sends(refuse=False)
        await trio.sleep(0.1)
        assert (await llm.generate(PROMPT, MANY)).outputs[0].text == "abcabccbac"
        first, _ = added(transport)
        (told,) = aborted(transport)
        assert isinstance(told, list)
        assert told[0] == first
        assert len(set(added(transport))) == 2


async def test_a_question_to_a_hung_engine_is_work_too(autojump_clock: MockClock) -> None:
    async with open_scripted(HANGS) as (llm, _):
        with trio.move_on_after(1):
            await llm.generate(PROMPT, MANY)
        with trio.fail_after(200), pytest.raises(EngineUnavailableError, match="makes no step"):
            await llm.is_sleeping()
        assert llm.health().state is LLMState.FROZEN


async def test_who_waits_when_the_block_is_left_hears_of_it(autojump_clock: MockClock) -> None:
    ended: list[str] = []
    all_ended = trio.Event()
    async with trio.open_nursery() as outer:
        async with open_scripted(HANGS) as (llm, _):
            with trio.move_on_after(1):
                await llm.generate(PROMPT, MANY)

            async def call() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await llm.is_sleeping()
                ended.append("call")

            async def wait_dead() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await llm.wait_dead()
                ended.append("wait_dead")
                all_ended.set()

            outer.start_soon(call)
            outer.start_soon(wait_dead)
            await wait_all_tasks_blocked()
        with trio.fail_after(5):
            await all_ended.wait()
            await wait_all_tasks_blocked()
        assert sorted(ended) == ["call", "wait_dead"]
        with pytest.raises(trio.ClosedResourceError):
            await llm.is_sleeping()
        with pytest.raises(ServerShutdown):
            await llm.wait_ready()


async def test_a_tracer_that_fails_costs_no_token(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Tracer:
        def on_message(self, *_: object) -> None:
            raise KeyError("a bug of a tracer")

    async with open_scripted(WORDS) as (llm, _):
        llm.tracer = Tracer()  # type: ignore[assignment]
        assert (await llm.generate(PROMPT, MANY)).outputs[0].text == "abcabccbac"
        assert llm.tracer is None
    assert "the tracer failed and is dropped" in caplog.text


async def test_an_id_of_a_stranger_writes_no_lines_of_its_own(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:

    caplog.set_level("INFO", "trioleg")
    async with open_scripted(WORDS) as (_, transport):
        stranger = EngineCoreOutput("x\n2026-01-01 INFO request y ended: FAKE", [5])
        message = EngineCoreOutputs(outputs=[stranger], timestamp=1.0)
        transport.inject([msgspec.msgpack.encode(message)])
        await trio.sleep(1)
    assert all("\n" not in record.getMessage() for record in caplog.records)


def no_descriptors() -> None:
    raise OSError(errno.EMFILE, "Too many open files")


async def test_no_descriptors_for_sockets_is_a_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZeroMQ would end the process; so it is looked before."""
    monkeypatch.setattr("os.open", lambda *_: no_descriptors())
    with pytest.raises(OSError, match="Too many open files"):
        sockets.make_context()
    with pytest.raises(EngineStartError, match="Too many open files"):
        ZmqTransport("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", identity=b"\0\0")
    with pytest.raises(EngineStartError, match="Too many open files"):
        async with listen_for_engine("tcp://127.0.0.1:0"):
            pytest.fail("there is no socket")


@pytest.mark.parametrize("value", [None, 0, -1, float("nan"), float("inf"), "5", True])
@pytest.mark.parametrize(
    "name",
    [
        "start_timeout",
        "unreachable_timeout",
        "step_timeout",
        "frozen_timeout",
        "engine_stop_timeout",
        "output_chunk_size",
        "mailbox_max_bytes",
        "max_engine_restarts",
    ],
)
def test_settings_that_cannot_be(name: str, value: object) -> None:
    if value is True and name.endswith("_timeout"):
        value = "yes"
    with pytest.raises(InvalidRequestError, match=rf"^{name} is .*; allowed: ") as caught:
        LLMConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeouts", 5),
        ("timeouts", {"total": 5}),
        ("engine", None),
        ("restart_engine", "no"),
    ],
)
def test_settings_of_another_kind(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{name} is "):
        LLMConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("port", -1),
        ("port", "8000"),
        ("host", None),
        ("max_body_bytes", "a"),
        ("max_body_bytes", -1),
        ("engine_death_linger", float("nan")),
        ("write_timeout", -1),
        ("graceful_timeout", "5"),
        ("sse_keep_alive_interval", 0),
    ],
)
def test_a_servers_settings_that_cannot_be(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{name} is .*; allowed: "):
        ServerConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "more", [{"timeouts": 5}, {"timeouts": {"total": 5}}, {"arrived_at": float("nan")}]
)
async def test_options_of_a_request_that_cannot_be(
    autojump_clock: MockClock, more: dict[str, object]
) -> None:
    (name,) = more
    async with open_scripted(WORDS) as (llm, transport):
        with pytest.raises(InvalidRequestError, match=rf"^{name} is .*; allowed: "):
            await llm.generate(PROMPT, MANY, **more)  # type: ignore[arg-type]
        assert isinstance(transport, ScriptedTransport)
        assert added(transport) == []
        assert llm.statistics().endings == {}


async def test_a_bug_in_the_link_is_told_as_the_end_of_its_engine(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step in hand is lost: what the engine sends behind it must not close the gap."""
    process, steps = OutputProcessor.process, 0

    def fail_at_the_third(self: OutputProcessor, *outputs: Any, **more: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps >= 3:
            raise RuntimeError("a bug")
        return process(self, *outputs, **more)

    monkeypatch.setattr(OutputProcessor, "process", fail_at_the_third)
    async with open_scripted(script(*"abcabc", step=0.01, finish="length")) as (llm, transport):
        with pytest.raises(
            EngineDeadError, match="its link has failed: RuntimeError: a bug"
        ) as got:
            await llm.generate(PROMPT, MANY)
        assert got.value.partial is None or not got.value.partial.finished
        assert len(aborted(transport)) == 1
        assert "its link has failed: RuntimeError: a bug" in await llm.wait_dead()
    assert any(record.exc_info for record in caplog.records)


async def test_an_abort_that_cannot_be_made_ends_nothing_else(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One is due in the reader's own step: a stop string ends what the engine would go on with."""

    def fail(_ids: object) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(outbox, "encode_abort", fail)
    async with open_scripted(script(*"abcabc", finish="length")) as (llm, _transport):
        answer = await llm.generate(PROMPT, SamplingParams(max_tokens=100, stop=["b"]))
        assert answer.outputs[0].finish_reason == "stop"
        answer = await llm.generate(PROMPT, MANY)
        assert answer.outputs[0].text == "abcabc"
    assert "no ABORT for" in caplog.text
