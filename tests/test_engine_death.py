"""The engine is killed, frozen or orphaned under load, with real processes: who is told what, and when.

The rows named in the tests are kinds of faults that servers like this one have had.
"""

from __future__ import annotations

import os
import signal

import pytest
import trio
from programs import descendants
from served import COUNTED, Answer, Client, open_client, serving, stopped, wait_gone, write_script

import trioleg
from trioleg.errors import EngineDeadError

OURS_OR_NOT = pytest.mark.parametrize("attached", [False, True], ids=["ours", "attached"])

# A process that is stopped does not hear that it should leave, either.
IMPATIENT = {"frozen_timeout": 0.5, "engine_stop_timeout": 0.5}

# Fewer than what is asked for, so that some requests wait in the engine.
FOR_TWELVE = {"max_num_seqs": 12}


async def ask_sixteen(client: Client) -> list[Answer]:
    """Eight streams and four plain requests that run, then two of each that wait."""
    running = [client.ask(stream=number < 8, max_tokens=1_500) for number in range(12)]
    await client.until_in_engine(running=12, waiting=0)
    waiting = [client.ask(stream=number < 2) for number in range(4)]
    await client.until_in_engine(running=12, waiting=4)
    await client.until(lambda: all(answer.text for answer in running[:8]))
    return [*running, *waiting]


def assert_told_in_form(answers: list[Answer]) -> None:
    """Of ``ask_sixteen``: an event where the stream had begun, else a status; what there was comes along."""
    assert all(answer.is_told and answer.error["code"] == "engine_dead" for answer in answers)
    assert [answer.status for answer in answers] == [200] * 8 + [503] * 8
    assert all(answer.text for answer in answers[:12])
    assert all("partial" in answer.error for answer in answers[8:12])
    assert not any(answer.text or "partial" in answer.error for answer in answers[12:])
    assert all(COUNTED.startswith(answer.text) for answer in answers)


@OURS_OR_NOT
async def test_d1_a_killed_engine_ends_every_request_in_its_form(
    smollm2, tmp_path, attached
) -> None:
    with serving(tmp_path, attached=attached, **FOR_TWELVE) as server:
        async with open_client(server) as client:
            answers = await ask_sixteen(client)
            os.kill(server.engine, signal.SIGKILL)
            with trio.fail_after(10.0):
                await client.until(lambda: all(answer.is_done for answer in answers))
                health = await client.until_health(503)
            assert_told_in_form(answers)
            cause = answers[0].error["message"]
            assert ("connection is lost" if attached else "it was killed by SIGKILL") in cause
            assert cause in health.text
            for stream in (True, False):
                late = await client.answered(stream=stream)
                assert (late.status, late.error["message"]) == (503, cause)
            assert await client.metric("trioleg_open_streams") == 0
        server.signal(signal.SIGTERM)
        assert await server.wait() == 1


@OURS_OR_NOT
async def test_d2_a_frozen_engine_is_told_of_and_comes_back(smollm2, tmp_path, attached) -> None:
    with serving(tmp_path, attached=attached, **FOR_TWELVE) as server:
        async with open_client(server) as client:
            answers = await ask_sixteen(client)
            with stopped(server.engine):
                await client.until_health(503, "frozen")
                await client.until(lambda: all(answer.is_done for answer in answers))
                assert_told_in_form(answers)
                assert "does not answer" in answers[0].error["message"]
                assert (await client.answered()).status == 503
            await client.until_health(200)
            assert (await client.answered(max_tokens=50)).is_exact
            await client.until_idle()
        server.signal(signal.SIGTERM)
        assert await server.wait() == 0


@OURS_OR_NOT
async def test_d2_an_engine_that_is_frozen_while_idle_is_seen_too(
    smollm2, tmp_path, attached
) -> None:
    with serving(tmp_path, attached=attached) as server:
        async with open_client(server) as client:
            for _ in range(2):
                with stopped(server.engine):
                    await client.until_health(503, "frozen")
                await client.until_health(200)
                assert (await client.answered(max_tokens=50)).is_exact


@OURS_OR_NOT
@pytest.mark.parametrize("seconds", [0.4, 1.2])
async def test_d2_a_short_freeze_loses_no_token(smollm2, tmp_path, attached, seconds) -> None:
    """0.4 s are less than what the heartbeats allow, 1.2 s break the connection of the input leg."""
    patient = {"unreachable_timeout": 20.0}
    with serving(tmp_path, attached=attached, llm=patient) as server:
        async with open_client(server) as client:
            answers = [client.ask(stream=number < 6, max_tokens=600) for number in range(8)]
            await client.until(lambda: all(answer.text for answer in answers[:6]))
            for _ in range(3):
                with stopped(server.engine):
                    await trio.sleep(seconds)
                seen = len(answers[0].text)
                await client.until(lambda seen=seen: len(answers[0].text) > seen)
            await client.until(lambda: all(answer.is_done for answer in answers))
            assert all(answer.is_exact for answer in answers), answers
            await client.until_idle()


@OURS_OR_NOT
async def test_d2_a_front_end_that_was_stopped_goes_on(smollm2, tmp_path, attached) -> None:
    with serving(tmp_path, attached=attached, step_interval_s=0.005) as server:
        async with open_client(server) as client:
            answers = [client.ask(stream=number < 6, max_tokens=600) for number in range(8)]
            await client.until(lambda: all(answer.text for answer in answers[:6]))
            with stopped(server.program.process.pid):
                await trio.sleep(3.0)
            await client.until(lambda: all(answer.is_done for answer in answers))
            assert all(answer.is_exact for answer in answers), answers
            assert (await client.answered(max_tokens=50)).is_exact
            await client.until_idle()


@OURS_OR_NOT
async def test_d2_an_engine_that_stays_frozen_is_given_up(smollm2, tmp_path, attached) -> None:
    with serving(tmp_path, attached=attached, llm=IMPATIENT) as server:
        async with open_client(server) as client:
            answer = client.ask(max_tokens=1_500)
            await client.until(lambda: answer.text)
            engine = server.engine
            with stopped(engine):
                await client.until(lambda: answer.is_done)
                assert answer.is_told
                await client.until_health(503, "was given up after 0.5 s more")
                server.signal(signal.SIGTERM)
                assert await server.wait() == 1
                if not attached:
                    wait_gone(engine)


async def test_d2_stopped_then_killed(smollm2, tmp_path) -> None:
    with serving(tmp_path) as server:
        async with open_client(server) as client:
            with stopped(server.engine):
                await client.until_health(503, "frozen")
                os.kill(server.engine, signal.SIGKILL)
                await client.until_health(503, "it was killed by SIGKILL")


async def test_an_engine_that_was_asked_to_leave_by_others_is_gone_all_the_same(
    smollm2, tmp_path
) -> None:
    with serving(tmp_path) as server:
        async with open_client(server) as client:
            answer = client.ask(max_tokens=1_500)
            await client.until(lambda: answer.text)
            whole = client.ask(stream=False, max_tokens=1_500)
            await client.until_in_engine(running=2, waiting=0)
            os.kill(server.engine, signal.SIGTERM)
            await client.until(lambda: answer.is_done and whole.is_done)
            # Nobody has aborted them: they may be asked again.
            assert answer.is_told
            assert (whole.status, whole.error["code"]) == (503, "engine_dead")
            assert "x-should-retry" not in whole.headers
            await client.until_health(503, "it exited with status 0")
        server.signal(signal.SIGTERM)
        assert await server.wait() == 1


async def test_a_killed_guardian_takes_the_engine_with_it(smollm2, tmp_path) -> None:
    with serving(tmp_path) as server:
        async with open_client(server) as client:
            answer = client.ask(max_tokens=1_500)
            await client.until(lambda: answer.text)
            family = server.family
            os.kill(server.guardian, signal.SIGKILL)
            await client.until(lambda: answer.is_done)
            assert answer.is_told
            await client.until_health(503, "its guardian was killed")
            wait_gone(*family)


async def test_a_guardian_that_is_stopped_does_not_hide_the_engines_death(
    smollm2, tmp_path
) -> None:
    with serving(tmp_path, llm=IMPATIENT) as server:
        async with open_client(server) as client:
            answer = client.ask(max_tokens=1_500)
            await client.until(lambda: answer.text)
            family = server.family
            with stopped(server.guardian):
                os.kill(server.engine, signal.SIGKILL)
                await client.until(lambda: answer.is_done)
                assert answer.is_told
                await client.until_health(503, "connection is lost")
                server.signal(signal.SIGTERM)
                assert await server.wait() == 1
            wait_gone(*family)


async def test_d16_of_two_engines_in_one_program_only_the_dead_ones_requests_fail(
    smollm2, tmp_path
) -> None:
    script = write_script(tmp_path)
    params = trioleg.SamplingParams(max_tokens=400, temperature=0.0)
    texts: dict[str, str] = {}

    async def read(llm: trioleg.LLM, name: str) -> None:
        texts[name] = (await llm.generate("Count", params)).outputs[0].text

    with trio.fail_after(60.0):
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            async with trioleg.open_llm("smollm2-135m", script=script) as doomed:
                _, doomed_pid = descendants(os.getpid())
                async with (
                    trioleg.open_llm("smollm2-135m", script=script) as other,
                    trio.open_nursery() as nursery,
                ):
                    for number in range(4):
                        nursery.start_soon(read, other, f"other {number}")
                    async with doomed.open_stream("Count", params) as stream:
                        await stream.receive()
                        os.kill(doomed_pid, signal.SIGKILL)
                        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                            async for _ in stream:
                                pass
                    with pytest.raises(EngineDeadError):
                        await doomed.generate("Count", params)
                    await read(other, "after")
    assert len(texts) == 5
    assert len(set(texts.values())) == 1
