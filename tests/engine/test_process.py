"""The engine process on the wire: what it answers, and what must not end it."""

from __future__ import annotations

import msgspec
import pytest
import trio
import zmq
from engine_harness import importable, make_request, open_engine

from trioleg.engine.process import run_engine
from trioleg.engine.scripted import Script, start_scripted_core
from trioleg.ipc.codec import decode_outputs, encode, encode_abort, encode_request
from trioleg.ipc.launch import private_ipc_dir
from trioleg.ipc.sockets import Context, ZmqSocket, close_sockets, make_socket
from trioleg.messages import EngineCoreRequestType, FinishReason

__all__ = ["importable"]

pytestmark = pytest.mark.usefixtures("importable")
FAST = Script(token_ids=[10, 11, 12])
# A step a millisecond, without an end of its own: for requests that are to be in progress.
ENDLESS = Script(token_ids=[1], step_interval_s=0.001, max_model_len=10**9, num_gpu_blocks=10**9)
pack = msgspec.msgpack.encode


async def test_requests_are_served_side_by_side(tmp_path) -> None:
    async with open_engine(FAST, tmp_path) as head:
        names = [f"r{number}" for number in range(100)]
        for name in names:
            head.add(name)
        await head.receive_until_finished(names)
        assert {tuple(head.answers[name].token_ids) for name in names} == {(10, 11, 12, 10, 11)}
        assert head.answers["r7"].finish_reason is FinishReason.LENGTH
        assert head.last is not None
        assert head.last.engine_index == 0
        assert head.last.timestamp > 0
        assert (head.ready.max_model_len, head.ready.block_size) == (2048, 16)


async def test_an_abort_stops_the_tokens_and_gives_the_blocks_back(tmp_path) -> None:
    async with open_engine(ENDLESS, tmp_path) as head:
        head.add("r", max_tokens=1_000_000)
        while "r" not in head.answers:
            await head.receive()
        head.transport.send(EngineCoreRequestType.ABORT, encode_abort(["r", "unknown"]))
        while head.last is None or head.last.scheduler_stats.num_running_reqs:  # type: ignore[union-attr]
            await head.receive()
        assert head.last.scheduler_stats is not None
        assert head.last.scheduler_stats.kv_cache_usage == 0.0
        assert head.answers["r"].finish_reason is None


async def test_utilities(tmp_path) -> None:
    async with open_engine(FAST, tmp_path) as head:
        answer = await head.call("get_supported_tasks", call_id=2**63)
        assert (answer.call_id, answer.failure_message) == (2**63, None)
        assert answer.result == [None, ["generate"]]
        assert (await head.call("is_sleeping")).result == [None, False]
        assert (await head.call("reset_prefix_cache", False, False)).result == [None, True]
        failed = await head.call("fly", 3)
        assert failed.result is None
        assert failed.failure_message is not None
        assert "there is no such utility; allowed: " in failed.failure_message


async def test_no_frame_ends_the_engine(tmp_path) -> None:
    bad_add = encode_request(make_request("bad"))
    async with open_engine(FAST, tmp_path) as head:
        head.send_raw(b"")
        head.send_raw(b"\x00")
        head.send_raw(b"\x00", b"")
        head.send_raw(b"\x00", b"\xc1" * 10)
        head.send_raw(b"\x00", bad_add[:-3])
        head.send_raw(b"\x00", pack([7] * 9))
        head.send_raw(b"\x00", encode_request(make_request("nobody", client_index=9)))
        head.send_raw(b"\x01", pack("not a list"))
        head.send_raw(b"\x01", pack([1, 2]))
        head.send_raw(b"\x02", pack([1, None]))
        head.send_raw(b"\x03", pack([0, 1]))
        head.send_raw(b"\x03", pack([5, 1, "is_sleeping", []]))
        head.send_raw(b"\x03", pack([0, 1, "x" * 10_000, []]))
        head.send_raw(b"\x04", pack(None))
        head.send_raw(b"\x05", pack(None))
        head.send_raw(b"too long", b"body", b"more")
        head.add("good")
        await head.receive_until_finished(["good"])
        assert head.answers["good"].token_ids == [10, 11, 12, 10, 11]
    log = "\n".join(head.lines)
    assert "START_DP_WAVE is of vLLM's own engines" in log
    assert "EXECUTOR_FAILED is of vLLM's own engines" in log
    assert "client_index is 9; allowed: 0 to 0" in log


async def test_a_bad_request_is_answered_and_its_neighbours_go_on(tmp_path) -> None:
    async with open_engine(FAST, tmp_path) as head:
        for number in range(3):
            head.add(f"good{number}")
        undecodable = msgspec.msgpack.decode(encode_request(make_request("hot")))
        undecodable[3]["temperature"] = "hot"
        head.send_raw(b"\x00", pack(undecodable))
        head.add("long", prompt=[1] * 2048)
        head.add("empty", prompt=[])
        head.add("scored", logprobs=-1)
        refused = {
            "hot": "Expected `float`, got `str`",
            "long": "prompt_token_ids is 2048 tokens long; allowed: 1 to 2047",
            "empty": "prompt_token_ids",
            "scored": "logprobs is -1; allowed: 0 to 20, or None",
        }
        await head.receive_until_finished([*refused, "good0", "good1", "good2"])
        for name, why in refused.items():
            answer = head.answers[name]
            assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.ERROR)
            assert isinstance(answer.stop_reason, str)
            assert why in answer.stop_reason
        assert head.answers["good2"].token_ids == [10, 11, 12, 10, 11]


async def test_a_duplicate_id_ends_both_and_nothing_else(tmp_path) -> None:
    async with open_engine(ENDLESS, tmp_path) as head:
        head.add("twin", max_tokens=1_000_000)
        while "twin" not in head.answers:
            await head.receive()
        head.add("twin")
        await head.receive_until_finished(["twin"])
        assert head.answers["twin"].finish_reason is FinishReason.ERROR
        head.add("other")
        await head.receive_until_finished(["other"])


async def test_answers_go_to_the_client_that_the_request_names() -> None:
    """Two clients, the engine in this very process, and each request by the other's input leg."""
    context: Context = zmq.Context()
    with private_ipc_dir() as folder, trio.fail_after(60.0):
        handshake = bind(context, zmq.ROUTER, f"ipc://{folder}/handshake")
        inputs = [bind(context, zmq.ROUTER, f"ipc://{folder}/in{client}") for client in (0, 1)]
        outputs = [bind(context, zmq.PULL, f"ipc://{folder}/out{client}") for client in (0, 1)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                run_engine, lambda: start_scripted_core(FAST), f"ipc://{folder}/handshake"
            )
            identity, _ = await handshake.recv_multipart()
            legs = {
                "inputs": [f"ipc://{folder}/in{client}" for client in (0, 1)],
                "outputs": [f"ipc://{folder}/out{client}" for client in (0, 1)],
            }
            handshake.send_multipart([identity, encode({"addresses": legs})])
            for client, leg in enumerate(inputs):
                await leg.recv_multipart()
                request = make_request(f"r{client}", client_index=1 - client, max_tokens=1)
                leg.send_multipart([identity, b"\x00", encode_request(request)])
            for client, leg in enumerate(outputs):
                outs = []
                while not outs:
                    outs = decode_outputs(await leg.recv_multipart()).outputs
                assert [output.request_id for output in outs] == [f"r{1 - client}"]
            nursery.cancel_scope.cancel()
        await close_sockets(context, [handshake, *inputs, *outputs], linger=0.0)


def bind(context: Context, kind: int, address: str) -> ZmqSocket:
    socket = ZmqSocket(make_socket(context, kind))
    socket.raw.bind(address)
    return socket


async def test_the_queue_of_a_crowd_is_served_in_the_order_of_arrival(tmp_path) -> None:
    script = Script(token_ids=[5], max_num_seqs=2)
    async with open_engine(script, tmp_path) as head:
        for number in range(6):
            head.add(f"r{number}")
        for number in range(6):
            await head.receive_until_finished([f"r{number}"])
            later = [head.answers.get(f"r{n}") for n in range(number + 2, 6)]
            assert all(answer is None or answer.finish_reason is None for answer in later)
