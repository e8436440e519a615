"""``--restart-engine`` with real processes: the port stays, clients are told, and the next engine serves.

Row D14: a server whose engine dies now and then should not have to be restarted by hand.
"""

from __future__ import annotations

import os
import signal

import pytest
import trio
from programs import TRIOLEG, alive, running, wait_until
from served import Answer, Client, Server, open_client, serving, wait_gone, write_script

RESTART = "--restart-engine"

# An engine that is stopped does not hear that it should leave, either.
IMPATIENT = {"frozen_timeout": 0.5, "engine_stop_timeout": 0.5}


async def until_refused(client: Client) -> Answer:
    """Asks until the answer is that there is no engine at the moment."""
    while (answer := await client.answered(max_tokens=5)).status == 200:
        pass
    return answer


async def until_exact(client: Client) -> Answer:
    """Asks until there is an engine again; until then every answer is a 503 that says when to ask."""
    while (answer := await client.answered(max_tokens=50)).status != 200:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
    assert answer.is_exact
    return answer


def until_restarting(server: Server) -> list[int]:
    """The guardian and the engine that were there before, once they have been replaced by others."""
    before = server.family
    os.kill(server.engine, signal.SIGKILL)
    wait_gone(*before)
    wait_until(lambda: len(server.family) == 2)
    return before


async def test_d14_three_deaths_under_load(smollm2, tmp_path) -> None:
    with serving(tmp_path, RESTART) as server:
        async with open_client(server, seconds=60.0) as client:
            ids: list[set[str]] = []
            for _ in range(3):
                begun = [client.ask(stream=number < 6, max_tokens=1_500) for number in range(8)]
                await client.until(lambda begun=begun: all(one.text for one in begun[:6]))
                os.kill(server.engine, signal.SIGKILL)
                await client.until(lambda begun=begun: all(one.is_done for one in begun))
                assert all(one.is_told for one in begun)
                assert "killed by SIGKILL" in begun[0].error["message"]
                refused = await until_refused(client)
                assert (refused.status, int(refused.headers["retry-after"]) >= 1) == (503, True)
                await client.until_health(503, "restarting")
                exact = await until_exact(client)
                await client.until_health(200)
                ids += [one.ids for one in (*begun, exact) if one.ids]
            await client.until_idle()
            assert len(set().union(*ids)) == len(ids)
        server.signal(signal.SIGTERM)
        assert await server.wait() == 0


async def test_d14_an_engine_that_stays_frozen_is_replaced(smollm2, tmp_path) -> None:
    with serving(tmp_path, RESTART, llm=IMPATIENT) as server:
        async with open_client(server) as client:
            answer = client.ask(max_tokens=1_500)
            await client.until(lambda: answer.text)
            before = server.family
            os.kill(server.engine, signal.SIGSTOP)
            await client.until(lambda: answer.is_done)
            assert answer.is_told
            await until_refused(client)
            await until_exact(client)
            wait_gone(*before)


async def test_d14_another_engine_may_join_where_one_has_died(smollm2, tmp_path) -> None:
    address = f"ipc://{tmp_path}/join"
    script = write_script(tmp_path)
    join = (*TRIOLEG, "engine", "--script", str(script), "--handshake", address)
    options = ("--attach", address, RESTART, "--port", "0")
    with running(*TRIOLEG, "serve", "smollm2-135m", *options) as program:
        server = Server(program)
        with running(*join):
            server.url = program.wait_for(r"ready: .* at (http://\S+)")[1]
        async with open_client(server) as client:
            await until_refused(client)
            with running(*join):
                await until_exact(client)
                server.signal(signal.SIGTERM)
                assert await server.wait() == 0


async def test_d14_an_engine_that_came_while_another_served_is_next(smollm2, tmp_path) -> None:
    address = f"ipc://{tmp_path}/join"
    join = (*TRIOLEG, "engine", "--script", str(write_script(tmp_path)), "--handshake", address)
    options = ("--attach", address, RESTART, "--port", "0")
    with running(*TRIOLEG, "serve", "smollm2-135m", *options) as program:
        server = Server(program)
        with running(*join) as first:
            server.url = program.wait_for(r"ready: .* at (http://\S+)")[1]
            # It says HELLO and waits for an answer, which comes when the first one is gone.
            with running(*join):
                async with open_client(server) as client:
                    assert (await client.answered()).is_exact
                    first.process.kill()
                    await until_refused(client)
                    await until_exact(client)


async def test_d14_the_last_death_of_too_many_is_the_servers_end(smollm2, tmp_path) -> None:
    limit = (RESTART, "--max-engine-restarts", "1")
    with serving(tmp_path, *limit, server={"engine_death_linger": 0.1}) as server:
        async with open_client(server) as client:
            os.kill(server.engine, signal.SIGKILL)
            await until_refused(client)
            await until_exact(client)
            family = server.family
            os.kill(server.engine, signal.SIGKILL)
            assert await server.wait() == 1
        assert not any(map(alive, family))
    assert server.last_line == (
        "trioleg: engine 0 is dead: it was killed by SIGKILL; no engine is started again, since "
        "max_engine_restarts is 1"
    )
    assert "Traceback" not in server.program.stderr


async def test_d14_an_engine_that_does_not_load_again_counts_as_a_death(smollm2, tmp_path) -> None:
    limit = (RESTART, "--max-engine-restarts", "1")
    with serving(tmp_path, *limit, server={"engine_death_linger": 0.1}) as server:
        write_script(tmp_path, load_error="model.safetensors is cut short")
        os.kill(server.engine, signal.SIGKILL)
        assert await server.wait() == 1
    assert "model.safetensors is cut short" in server.last_line
    assert server.last_line.endswith("since max_engine_restarts is 1")
    assert server.last_line.count("cut short") == 1


async def test_d14_a_start_that_failed_is_tried_again(smollm2, tmp_path) -> None:
    with serving(tmp_path, RESTART) as server:
        async with open_client(server) as client:
            write_script(tmp_path, load_error="the disk was away")
            os.kill(server.engine, signal.SIGKILL)
            server.program.wait_for("the disk was away")
            write_script(tmp_path)
            await until_exact(client)


@pytest.mark.parametrize("victim", ["guardian", "engine"])
async def test_d14_killed_while_it_loads_again(smollm2, tmp_path, victim) -> None:
    with serving(tmp_path, RESTART) as server:
        async with open_client(server) as client:
            write_script(tmp_path, load_s=600.0)
            until_restarting(server)
            family = server.family
            write_script(tmp_path)
            os.kill(getattr(server, victim), signal.SIGKILL)
            wait_gone(*family)
            await until_exact(client)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["waiting", "loading"])
async def test_d14_a_signal_while_restarting_ends_all_in_order(
    smollm2, tmp_path, moment, number
) -> None:
    """Nobody has given the engine up, so this is a server that was told to end, and did."""
    with serving(tmp_path, RESTART) as server:
        before = server.family
        write_script(tmp_path, load_s=600.0)
        if moment == "loading":
            until_restarting(server)
        else:
            os.kill(server.engine, signal.SIGKILL)
            server.program.wait_for("the engine is started again in")
        family = server.family
        server.signal(number)
        with trio.fail_after(10.0):
            assert await server.wait() == 0
        wait_gone(*before, *family)
    assert "Traceback" not in server.program.stderr


@pytest.mark.parametrize("moment", ["waiting", "loading"])
def test_d5_a_front_end_that_is_killed_while_restarting_leaves_nothing(
    smollm2, tmp_path, moment
) -> None:
    with serving(tmp_path, RESTART) as server:
        write_script(tmp_path, load_s=600.0)
        if moment == "loading":
            until_restarting(server)
        else:
            os.kill(server.engine, signal.SIGKILL)
            server.program.wait_for("the engine is started again in")
        family = server.family
        server.program.process.kill()
        wait_gone(*family)
