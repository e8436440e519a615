"""Who can reach the address at which engines join, and what has to be asked for."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from trioleg import EngineStartError, InvalidRequestError, LLMConfig
from trioleg.ipc.curve import make_keys
from trioleg.runtime.engines import listen_for_engines
from trioleg.runtime.opening import open_llm

# Kept for documents (RFC 5737 and 3849): no machine has them, so binding fails, behind all that is checked first.
ELSEWHERE = pytest.mark.parametrize("address", ["tcp://192.0.2.1:5", "tcp://[2001:db8::1]:5"])
ASKED_FOR = LLMConfig(allow_unauthenticated=True)


async def refusal(address: str, config: LLMConfig) -> str:
    with pytest.raises(InvalidRequestError, match="attach is") as caught:
        async with listen_for_engines(address, config):
            pytest.fail("nothing may be bound there")
    assert caught.value.parameter == "attach"
    return str(caught.value)


@pytest.mark.parametrize("config", [LLMConfig(), ASKED_FOR], ids=["default", "asked for"])
@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:1",
        "tcp://[::]:1",
        "tcp://*:1",
        "tcp://localhost:1",
        "tcp://engines.example:1",
        "tcp://lo:1",
        "tcp://::1:1",
        "tcp://[127.0.0.1]:1",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:" + "1" * 5000,
        "tcp://[::ffff:0.0.0.0]:1",
        "tcp://255.255.255.255:1",
        "tcp://224.0.0.1:1",
        "tcp://[ff02::1]:1",
        "ipc://*",
        "http://x",
        "ipc://",
        "5",
        "",
    ],
)
async def test_what_no_engine_could_be_told_is_refused(address: str, config: LLMConfig) -> None:
    assert "allowed: tcp://IP:PORT" in await refusal(address, config)


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:0", "tcp://127.8.0.1:*", "tcp://[::ffff:127.0.0.1]:0", "ipc://PRIVATE/x"],
)
async def test_what_others_cannot_reach_needs_nothing(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        async with listen_for_engines(address.replace("PRIVATE", str(tmp_path)), LLMConfig()):
            assert not caplog.records


@ELSEWHERE
async def test_other_addresses_have_to_be_asked_for(address: str) -> None:
    assert "has no authentication and no encryption" in await refusal(address, LLMConfig())


@ELSEWHERE
async def test_what_the_wire_lacks_is_said_once(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineStartError, match="cannot listen on"):
        async with listen_for_engines(address, ASKED_FOR):
            pytest.fail("nobody has this address")
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert f"attach is {address}, which is not this machine's alone" in warning.getMessage()
    assert "can pose as an engine" in warning.getMessage()


@ELSEWHERE
async def test_with_keys_there_is_nothing_to_warn_of(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    front_end, _ = make_keys(tmp_path)
    with pytest.raises(EngineStartError, match="cannot listen on"):
        async with listen_for_engines(address, LLMConfig(curve_keys=front_end)):
            pytest.fail("nobody has this address")
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o770, 0o757, 0o1777])
async def test_a_folder_that_others_can_write_to(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    address = f"ipc://{tmp_path}/join"
    assert "a folder that others cannot write to" in await refusal(address, LLMConfig())
    async with listen_for_engines(address, ASKED_FOR):
        assert (tmp_path / "join").is_socket()


async def expect_not_private(folder: Path) -> None:
    address = f"ipc://{folder}/join"
    assert "a folder that others cannot write to" in await refusal(address, LLMConfig())


async def test_a_private_folder_in_one_that_others_can_write_to(tmp_path: Path) -> None:
    """They could rename it and put theirs in its place; not where the sticky bit forbids that."""
    inner = tmp_path / "open" / "inner"
    inner.mkdir(mode=0o700, parents=True)
    inner.parent.chmod(0o777)
    (tmp_path / "link").symlink_to(inner)
    for folder in (inner, tmp_path / "link"):
        await expect_not_private(folder)
    inner.parent.chmod(0o1777)
    for folder in (inner, tmp_path / "link"):
        async with listen_for_engines(f"ipc://{folder}/join", LLMConfig()):
            assert (inner / "join").is_socket()


async def test_a_way_to_a_private_folder_through_one_that_others_can_write_to(
    tmp_path: Path,
) -> None:
    """The link in it could lead elsewhere by the time an engine goes there."""
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "link").symlink_to(tmp_path / "private")
    await expect_not_private(tmp_path / "open" / "link")


async def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    there = os.lstat

    def seen(path: Path) -> os.stat_result:
        found = there(path)
        is_theirs = Path(path).name == "theirs"
        return os.stat_result([*found[:4], 4321 if is_theirs else found.st_uid, *found[5:]])

    monkeypatch.setattr(Path, "lstat", seen)
    await expect_not_private(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("setting", "value"), [("curve_keys", Path("keys")), ("allow_unauthenticated", True)]
)
async def test_an_engine_of_our_own_needs_neither(
    smollm2: Path, setting: str, value: object
) -> None:
    with pytest.raises(InvalidRequestError, match=f"{setting} is .*only with attach") as caught:
        async with open_llm(smollm2, LLMConfig(**{setting: value})):
            pytest.fail("no engine may be started")
    assert caught.value.parameter == setting


def test_keys_and_no_keys_contradict_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="allowed: one of them"):
        LLMConfig(curve_keys=Path("keys"), allow_unauthenticated=True)
    with pytest.raises(InvalidRequestError, match="curve_keys is 'keys'; allowed: Path"):
        LLMConfig(curve_keys="keys")
