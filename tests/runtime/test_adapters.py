"""LoRA adapters of an ``LLM``: what reaches the engine, what never may, and what outlives it; in virtual time.

The scripted engine treats adapters as vLLM's does: it reads one from its path whenever a request needs it, and dies
where it cannot.
"""

from __future__ import annotations

import msgspec
import pytest
import trio
from scripted_llm import PROMPT, TOKENIZER, open_scripted, script
from test_supervisor import Fleet
from tiny_tokenizers import ids
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg import (
    EngineStartError,
    EngineUnavailableError,
    InvalidRequestError,
    LLMConfig,
    LoRAAdapterNotFoundError,
    LoRAModulePath,
    LoRARequest,
    SamplingParams,
)
from trioleg.messages import EngineCoreRequestType
from trioleg.runtime.llm import LLM
from trioleg.runtime.opening import running
from trioleg.testing import ScriptedTransport

LORAS = {"/sql": ids("b"), "/chat": ids("c"), "/more": ids(*"bc"), "/big": []}
SERVED = script("a", "a", "a", "a", finish="length", loras=LORAS, max_loras=2)
FOUR = SamplingParams(max_tokens=4)
SQL = LoRARequest("sql", 1, "/sql")
CHAT = LoRARequest("chat", 2, "/chat")
MORE = LoRARequest("more", 3, "/more")


async def text(llm: LLM, lora_request: LoRARequest | None = None, n: int = 1) -> str:
    params = SamplingParams(max_tokens=4, n=n)
    output = await llm.generate(PROMPT, params, lora_request=lora_request)
    return "|".join(one.text for one in output.outputs)


def sent(transport: ScriptedTransport, kind: EngineCoreRequestType) -> list[list[object]]:
    return [msgspec.msgpack.decode(body) for sent, body in transport.sent if sent is kind]


def on_the_wire(transport: ScriptedTransport) -> list[object]:
    return [fields[6] for fields in sent(transport, EngineCoreRequestType.ADD)]


def wire(name: str, number: int, path: str, *, load_inplace: bool = False) -> list[object]:
    return [name, number, path, None, *[True] * load_inplace]


def calls(transport: ScriptedTransport) -> list[object]:
    """The utility calls about adapters and caches, each with its arguments."""
    return [
        [method, *args]
        for _, _, method, args in sent(transport, EngineCoreRequestType.UTILITY)
        if method != "get_supported_tasks"
    ]


async def test_each_request_gets_the_adapter_that_it_names(autojump_clock: MockClock) -> None:
    async with open_scripted(SERVED) as (llm, transport):
        assert await llm.add_lora(SQL)
        assert await llm.add_lora(SQL), "twice is once"
        assert await text(llm) == "aaaa"
        assert await text(llm, SQL, n=3) == "bbbb|bbbb|bbbb"
        # One that nobody has loaded is loaded for the request.
        assert await text(llm, CHAT) == "cccc"
        assert await llm.list_loras() == {1, 2}
        assert list(llm.adapters.by_name) == ["sql", "chat"]
        assert on_the_wire(transport) == [
            None,
            *[wire("sql", 1, "/sql")] * 3,
            wire("chat", 2, "/chat"),
        ]
        added = [one for one in calls(transport) if one[0] == "add_lora"]
        assert added == [
            ["add_lora", wire("sql", 1, "/sql")],
            ["add_lora", wire("chat", 2, "/chat")],
        ]
        assert await llm.pin_lora(1)


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        (("", 1, "/sql"), "lora_name"),
        ((b"sql", 1, "/sql"), "lora_name"),
        (("sql", 0, "/sql"), "lora_int_id"),
        (("sql", -1, "/sql"), "lora_int_id"),
        (("sql", True, "/sql"), "lora_int_id"),
        (("sql", 2**63, "/sql"), "lora_int_id"),
        (("sql", "1", "/sql"), "lora_int_id"),
        (("sql", 1, ""), "lora_path"),
        (("sql", 1, "/a\0b"), "lora_path"),
        (("sql", 1, "/\ud800"), "lora_path"),
        (("sql", 1, None), "lora_path"),
        (("sql", 1, "/sql", 5), "base_model_name"),
        (("sql", 1, "/sql", None, 1), "load_inplace"),
        (("sql", 1, "/sql", None, False, "no"), "is_3d_lora_weight"),
    ],
)
def test_what_an_adapter_may_be(values: tuple[object, ...], parameter: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{parameter} is .*; allowed: ") as caught:
        LoRARequest(*values)
    assert caught.value.parameter == parameter


async def test_no_bad_adapter_reaches_a_step(autojump_clock: MockClock) -> None:
    """The engine would die of it; it is asked to load it first, and its refusal is the request's."""
    async with open_scripted(SERVED) as (llm, transport):
        with pytest.raises(LoRAAdapterNotFoundError, match="No adapter found for /none") as caught:
            await text(llm, LoRARequest("none", 1, "/none"))
        assert caught.value.parameter == "lora_path"
        with pytest.raises(InvalidRequestError, match="rank 64 is greater than max_lora_rank"):
            await llm.add_lora(LoRARequest("big", 1, "/big"))
        with pytest.raises(InvalidRequestError, match="lora_request is 'sql'; allowed: a LoRA"):
            await text(llm, "sql")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="lora_request is None; allowed: a LoRA"):
            await llm.add_lora(None)  # type: ignore[arg-type]
        for call in (llm.remove_lora, llm.pin_lora):
            with pytest.raises(InvalidRequestError, match="lora_id is 0; allowed: an integer"):
                await call(0)
        assert on_the_wire(transport) == []
        assert await text(llm, SQL) == "bbbb"


async def test_a_name_and_an_id_stand_for_one_adapter(autojump_clock: MockClock) -> None:
    async with open_scripted(SERVED) as (llm, transport):
        await llm.add_lora(SQL)
        others = [("sql", 2, "/sql"), ("other", 1, "/chat"), ("sql", 1, "/chat")]
        for other in (LoRARequest(*one) for one in others):
            with pytest.raises(InvalidRequestError, match="allowed: what is not taken by 'sql'"):
                await text(llm, other)
        # But it can be replaced, and what the old weights have left in the cache is not used with the new.
        assert await llm.add_lora(LoRARequest("sql", 1, "/chat", load_inplace=True))
        assert await text(llm, LoRARequest("sql", 1, "/chat")) == "cccc"
        await llm.add_lora(LoRARequest("sql", 1, "/sql", load_inplace=True))
        assert calls(transport)[-1] == ["reset_prefix_cache", True, False]
        assert on_the_wire(transport) == [wire("sql", 1, "/chat")], (
            "load_inplace is for loading alone"
        )


async def test_what_displaces_each_other_is_looked_at_again(autojump_clock: MockClock) -> None:
    """Three adapters, room for two: the one that is not there is read before its request is sent, and if its files
    are gone by then, that is the request's failure and nobody else's."""
    async with open_scripted(SERVED) as (llm, transport):
        for one in (SQL, CHAT, MORE):
            await llm.add_lora(one)
        assert await llm.list_loras() == {2, 3}
        assert await text(llm, SQL) == "bbbb"
        del transport.core._loras._by_path["/chat"]
        with pytest.raises(LoRAAdapterNotFoundError, match="No adapter found for /chat"):
            await text(llm, CHAT)
        assert await text(llm, MORE) == "bcbc"


async def test_unloaded_while_requests_use_it(autojump_clock: MockClock) -> None:
    """Those that use it go on, and the engine hears of it behind the last of them; new ones are refused."""
    async with open_scripted(SERVED) as (llm, transport):
        async with llm.open_stream(PROMPT, FOUR, lora_request=SQL) as stream:
            await stream.receive()
            async with llm.open_stream(PROMPT, FOUR, lora_request=SQL) as other:
                await other.receive()
                assert await llm.remove_lora(1)
                assert not await llm.remove_lora(1)
                with pytest.raises(InvalidRequestError, match="not loaded any more"):
                    await text(llm, SQL)
                assert list(llm.adapters.by_name) == []
            assert "remove_lora" not in [one[0] for one in calls(transport)]
            rest = "".join([one.outputs[0].text async for one in stream])
            assert rest == "bbb"
        # Behind the ABORT of the one that was left.
        assert transport.sent[-1][0] is EngineCoreRequestType.UTILITY
        assert calls(transport)[-1] == ["remove_lora", 1]
        assert len(sent(transport, EngineCoreRequestType.ABORT)) == 1
        assert await llm.list_loras() == set()
        await llm.add_lora(SQL)
        assert await text(llm, SQL) == "bbbb"


async def test_unloaded_while_a_request_is_prepared(autojump_clock: MockClock) -> None:
    """Tokenizing takes a while; the adapter that was there when the request came is there when it is sent."""
    fleet = Fleet(words=SERVED)
    go_on = trio.Event()

    async def slowly(tokenize: object) -> list[int]:
        await go_on.wait()
        return PROMPT

    llm = LLM("m", TOKENIZER, fleet.open, LLMConfig(), run_sync=slowly, clock=trio.current_time)
    outcomes: list[str] = []

    async def ask() -> None:
        try:
            outcomes.append((await llm.generate("a", FOUR, lora_request=SQL)).outputs[0].text)
        except InvalidRequestError as error:
            outcomes.append(str(error))

    async with running(llm):
        await llm.add_lora(SQL)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            await llm.remove_lora(1)
            assert await llm.list_loras() == {1}
            go_on.set()
        # It had not been sent: either is right, but never an engine that died of it, or an adapter that stays.
        assert "not loaded any more" in outcomes[0]
        assert await llm.list_loras() == set()
        assert llm.cause_of_death is None


async def test_loaded_twice_at_once(autojump_clock: MockClock) -> None:
    async with open_scripted(SERVED) as (llm, transport):
        refusals: list[str] = []

        async def load() -> None:
            try:
                await llm.adapters.load("sql", "/sql")
            except InvalidRequestError as error:
                refusals.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(load)
            nursery.start_soon(load)
        assert len(refusals) == 1
        assert "already been loaded" in refusals[0]
        assert [one[0] for one in calls(transport)] == ["add_lora"]


async def test_a_load_whose_answer_never_came(autojump_clock: MockClock) -> None:
    """Whether the engine did it is not known: the next request has it load what the name stands for."""
    async with open_scripted(SERVED) as (llm, transport):
        sql = await llm.adapters.load("sql", "/sql")
        transport._is_running = False
        with trio.move_on_after(1) as scope:
            await llm.adapters.load("sql", "/chat", load_inplace=True)
        assert scope.cancelled_caught
        assert calls(transport)[-1] == ["add_lora", wire("sql", 1, "/chat", load_inplace=True)]
        transport._is_running = True
        assert await text(llm, sql) == "bbbb"
        assert calls(transport)[-2] == ["add_lora", wire("sql", 1, "/sql", load_inplace=True)]
        # And no id that it may have something under is given to another name.
        transport._is_running = False
        with trio.move_on_after(1):
            await llm.adapters.load("chat", "/chat")
        transport._is_running = True
        assert (await llm.adapters.load("more", "/more")).lora_int_id == 3


async def test_loading_by_name_gives_ids(autojump_clock: MockClock) -> None:
    """An id is not used again: a request that still holds the old one gets no other adapter."""
    async with open_scripted(SERVED) as (llm, _):
        sql = await llm.adapters.load("sql", "/sql")
        assert (sql.lora_int_id, (await llm.adapters.load("chat", "/chat")).lora_int_id) == (1, 2)
        again = await llm.adapters.load("sql", "/more", load_inplace=True)
        assert (again.lora_int_id, await text(llm, again)) == (1, "bcbc")
        # One that was on its way when it was replaced.
        assert await text(llm, sql) == "bcbc"
        await llm.adapters.unload("sql")
        assert (await llm.adapters.load("sql", "/sql")).lora_int_id == 3
        with pytest.raises(InvalidRequestError, match="not loaded any more"):
            await text(llm, sql)
        with pytest.raises(LoRAAdapterNotFoundError, match="lora_name is 'none'"):
            await llm.adapters.unload("none")


async def test_loaded_again_while_the_old_one_is_still_used(autojump_clock: MockClock) -> None:
    async with open_scripted(SERVED) as (llm, transport):
        sql = await llm.adapters.load("sql", "/sql")
        async with llm.open_stream(PROMPT, FOUR, lora_request=sql) as stream:
            await stream.receive()
            await llm.adapters.unload("sql")
            again = await llm.adapters.load("sql", "/chat")
            assert again.lora_int_id == sql.lora_int_id, "for the engine a name is one adapter"
        assert await text(llm, again) == "cccc"
        assert "remove_lora" not in [one[0] for one in calls(transport)]


@pytest.mark.parametrize("says_so", [True, False])
async def test_an_engine_without_lora(autojump_clock: MockClock, says_so: bool) -> None:
    """Versions before 0.29 do not say whether they have it; then a question tells."""
    async with open_scripted(script("a", "a")) as (llm, transport):
        if not says_so:
            transport.ready.supports_lora = None
        with pytest.raises(InvalidRequestError, match="started with --enable-lora") as caught:
            await text(llm, SQL)
        assert ("LoRA is not enabled" in str(caught.value)) is not says_so
        assert on_the_wire(transport) == []


async def test_a_version_that_does_not_say_may_have_it(autojump_clock: MockClock) -> None:
    async with open_scripted(SERVED) as (llm, transport):
        transport.ready.supports_lora = None
        assert await text(llm, SQL) == "bbbb"


async def test_the_next_engine_has_them_before_it_is_ready(autojump_clock: MockClock) -> None:
    """But for one whose files are gone, which costs the others nothing."""
    fleet = Fleet(words=SERVED)
    config = LLMConfig(restart_engine=True, lora_modules=(LoRAModulePath("sql", "/sql"),))
    llm = fleet.llm(config)
    async with running(llm):
        assert await text(llm, llm.adapters.by_name["sql"]) == "bbbb"
        chat = await llm.adapters.load("chat", "/chat")
        fleet.words = msgspec.structs.replace(SERVED, loras={"/sql": ids("b")})
        async with llm.open_stream(PROMPT, FOUR, lora_request=chat) as stream:
            fleet.transports[0].inject_dead()
            with pytest.raises(Exception, match="reported its own death"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineUnavailableError):
                await llm.add_lora(MORE)
            with pytest.raises(EngineUnavailableError):
                await llm.remove_lora(1)
            await llm.wait_ready()
            assert calls(fleet.transports[1]) == [
                ["add_lora", wire("sql", 1, "/sql")],
                ["add_lora", wire("chat", 2, "/chat")],
            ]
            assert on_the_wire(fleet.transports[1]) == []
        assert list(llm.adapters.by_name) == ["sql"]
        assert await text(llm, llm.adapters.by_name["sql"]) == "bbbb"
        with pytest.raises(InvalidRequestError, match="not loaded any more"):
            await text(llm, chat)


async def test_the_first_engine_must_have_them(autojump_clock: MockClock) -> None:
    for path, words in {"/none": "No adapter found", "/big": "rank 64 is greater"}.items():
        modules = (LoRAModulePath("sql", path),)
        llm = Fleet(words=SERVED).llm(LLMConfig(restart_engine=True, lora_modules=modules))
        with pytest.raises(EngineStartError, match=f"lora_modules: .*{words}"):
            async with running(llm):
                pytest.fail("it must not be ready")


def test_modules_of_a_configuration() -> None:
    one = LoRAModulePath("sql", "/sql")
    for modules, words in (
        ((one, one), "names 'sql' twice"),
        ([one], "allowed: tuple"),
        (("sql=/sql",), "allowed: LoRAModulePath"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            LLMConfig(lora_modules=modules)  # type: ignore[arg-type]
