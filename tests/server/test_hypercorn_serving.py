"""``serve`` with settings of Hypercorn's, in a program of its own: what each of them does to a request."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from certificates import Certificates
from hypercorn.config import Config
from scripted_app import open_chat_llm

from trioleg.config import ServerConfig
from trioleg.errors import InvalidRequestError
from trioleg.server.binding import bind_sockets
from trioleg.server.serve import BoundServer, serve
from trioleg.testing import Script

GENEROUS_S = 20.0
CONFIG = ServerConfig(port=0)


@asynccontextmanager
async def served(**named: Any) -> AsyncIterator[BoundServer]:
    async with served_by(Config.from_mapping(errorlog=None, **named)) as bound:
        yield bound


@asynccontextmanager
async def served_by(config: Config, **more: Any) -> AsyncIterator[BoundServer]:
    with trio.fail_after(GENEROUS_S):
        async with open_chat_llm(Script(token_ids=[1])) as (llm, _), trio.open_nursery() as nursery:
            shutdown = trio.Event()
            yield await nursery.start(
                partial(serve, llm, CONFIG, hypercorn_config=config, shutdown=shutdown, **more)
            )
            shutdown.set()


async def get(url: str, path: str | None = None, **more: Any) -> httpx2.Response:
    transport = httpx2.AsyncHTTPTransport(uds=path, verify=more.pop("verify", True))
    async with httpx2.AsyncClient(transport=transport) as client:
        return await client.get(f"{url}/health", **more)


async def test_several_addresses(certificates: Certificates, tmp_path: Path) -> None:
    unix = f"{tmp_path}/s"
    async with served(
        bind=["127.0.0.1:0"],
        insecure_bind=["127.0.0.1:0", f"unix:{unix}"],
        certfile=certificates.pem("server"),
        keyfile=certificates.key("server"),
    ) as bound:
        urls = [one.url for one in bound.addresses]
        assert urls[0] == bound.url == f"https://127.0.0.1:{bound.port}"
        assert urls[1].startswith("http://127.0.0.1:")
        assert bound.addresses[2].path == unix
        for one in bound.addresses:
            answer = await get(one.url, one.path, verify=certificates.context())
            assert answer.status_code == 200
    assert not await trio.Path(unix).exists()


async def test_a_default_of_hypercorns_changes_nothing() -> None:
    """Its host and port, its keep-alive of 5 s: an address of ours, and a connection that is kept."""
    async with served() as bound:
        assert bound.port not in (0, 8000)


async def test_the_time_for_the_next_request() -> None:
    async with served(keep_alive_timeout=0.05) as bound:
        stream = await trio.open_tcp_stream(bound.host, bound.port)
        async with stream:
            assert await stream.receive_some() == b""


async def test_the_length_of_a_head() -> None:
    async with served(h11_max_incomplete_size=500) as bound:
        assert (await get(bound.url)).status_code == 200
        assert (await get(bound.url, headers={"x": "y" * 200_000})).status_code == 431


async def test_what_every_answer_says() -> None:
    async with served(
        include_server_header=False, include_date_header=False, alt_svc_headers=['h3=":443"']
    ) as bound:
        headers = (await get(bound.url)).headers
    assert headers["alt-svc"] == 'h3=":443"'
    assert not {"server", "date"} & set(headers)


async def test_the_names_of_the_server() -> None:
    async with served(server_names=["llm.example"]) as bound:
        assert (await get(bound.url)).status_code == 404
        assert (await get(bound.url, headers={"host": "llm.example"})).status_code == 200


async def test_what_every_path_begins_with() -> None:
    async with served(root_path="/llm/") as bound:
        assert bound.url.endswith("/llm")
        assert (await get(bound.url)).status_code == 200
        outside = await get(bound.url.removesuffix("/llm"))
        assert outside.status_code == 404
        assert "is not served; allowed: " in outside.text
        assert "POST /llm/v1/chat/completions" in outside.text


async def test_the_access_log(tmp_path: Path) -> None:
    log, unix = tmp_path / "access.log", str(tmp_path / "s")
    bind = ["127.0.0.1:0", f"unix:{unix}"]
    async with served(
        bind=bind, accesslog=str(log), access_log_format="%(m)s %(U)s %(s)s"
    ) as bound:
        for one in bound.addresses:
            await get(one.url, one.path)
    assert log.read_text().count("GET /health 200\n") == 2


async def test_the_servers_own_lines_go_to_the_error_log(tmp_path: Path) -> None:
    log = tmp_path / "error.log"
    async with served_by(Config.from_mapping(errorlog=str(log))):
        logging.getLogger("trioleg.server").error("something")
    assert "something" in log.read_text()


async def test_sockets_that_somebody_bound_speak_tls(certificates: Certificates) -> None:
    config = Config.from_mapping(
        certfile=certificates.pem("server"), keyfile=certificates.key("server"), errorlog=None
    )
    async with served_by(config, sockets=await bind_sockets(CONFIG)) as bound:
        assert bound.url.startswith("https://")
        answer = await get(bound.url, verify=certificates.context())
        assert answer.status_code == 200


async def test_a_refusal_closes_what_was_bound() -> None:
    (one,) = await bind_sockets(CONFIG)
    config = Config.from_mapping(workers=2)
    async with open_chat_llm(Script(token_ids=[1])) as (llm, _):
        with pytest.raises(InvalidRequestError, match="workers is 2"):
            await serve(llm, CONFIG, hypercorn_config=config, sockets=[one])
    assert one.fileno() == -1
