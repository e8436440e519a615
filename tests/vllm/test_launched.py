"""``trioleg serve --engine vllm``: a stock engine, from its start to every kind of its end.

Each end is one of design's: who is told what, what /health says, and that nothing of vLLM's is left. Loading takes
about half a minute, so the ways to look at one engine share it, and each way to end one needs its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import trio
from programs import TRIOLEG, descendants, running
from served import Client, Server, open_client, stopped, wait_gone
from vllm_place import VLLM_ENV, VLLM_PYTHON, VLLM_START_S

from trioleg import LLMConfig, VLLMConfig, open_llm
from trioleg.errors import EngineStartError, InvalidRequestError
from trioleg.model_store import resolve

# Ends are waited for with the engine's own pace in mind, on two cores that others use, too.
PATIENCE_S = 120.0
SETTINGS = ("--dtype", "float32", "--max-model-len", "1024")


@contextmanager
def launched(*options: str, flags: tuple[str, ...] = ()) -> Iterator[Server]:
    """A server with an engine of vLLM's that it has started."""
    vllm = ("--engine", "vllm", "--vllm-python", str(VLLM_PYTHON))
    flags = ("--enforce-eager", *flags)  # compiling takes longer than all that is asked here
    argv = ("serve", "smollm2-135m", "--port", "0", *vllm, *SETTINGS, *options, "--", *flags)
    with running(*TRIOLEG, *argv, env=VLLM_ENV) as program:
        ready = program.wait_for(r"ready: .* at (http://\S+)", VLLM_START_S)
        yield Server(program, url=ready[1])


def processes(server: Server) -> dict[str, int]:
    """Those of the engine, by what they are."""
    _guardian, launcher, *rest = server.family
    found = {"launcher": launcher}
    for pid in rest:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if name := re.search(r"VLLM::(EngineCore|Worker)", title):
            found[name[1]] = pid
    return found


async def two_streams(client: Client) -> list:
    answers = [client.ask(max_tokens=900, ignore_eos=True) for _ in range(2)]
    await client.until(lambda: all(one.text for one in answers))
    return answers


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("EngineCore", signal.SIGKILL),
        ("EngineCore", signal.SIGTERM),
        ("launcher", signal.SIGKILL),
        ("launcher", signal.SIGTERM),
        ("Worker", signal.SIGKILL),
    ],
)
async def test_an_engine_that_is_killed(smollm2, victim: str, number: signal.Signals) -> None:
    with launched() as server:
        family = server.family
        async with open_client(server, PATIENCE_S) as client:
            answers = await two_streams(client)
            os.kill(processes(server)[victim], number)
            await client.until(lambda: all(one.is_done for one in answers))
            if (victim, number) == ("EngineCore", signal.SIGTERM):
                # It aborts what it has itself, before it leaves: that is all that it says.
                assert {one.finish_reason for one in answers} == {"abort"}
            else:
                # Of a launcher that is killed the engine knows nothing: our guardian ends it.
                assert all(one.is_told for one in answers)
                assert {one.error["code"] for one in answers} == {"engine_dead"}
            await client.until_health(503, "engine 0 is dead")
            assert (await client.answered()).status == 503
        server.signal(signal.SIGTERM)
        assert await server.wait(PATIENCE_S) == 1
        wait_gone(*family)
    assert "Traceback" not in server.last_line


async def test_an_engine_that_stops_comes_back(smollm2) -> None:
    with launched() as server:
        async with open_client(server, PATIENCE_S) as client:
            answers = await two_streams(client)
            with stopped(processes(server)["EngineCore"]):
                await client.until_health(503, "frozen")
                await client.until(lambda: all(one.is_done for one in answers))
                assert all(one.is_told for one in answers)
            await client.until_health(200)
            assert (await client.answered(max_tokens=5)).status == 200
            await client.until_idle()
        server.signal(signal.SIGTERM)
        assert await server.wait(PATIENCE_S) == 0


async def test_drafts_and_priorities(smollm2) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    ordered = ("--scheduling-policy", "priority", "--max-num-seqs", "1")
    flags = ("--speculative-config", json.dumps(drafts))
    with launched(*ordered, flags=flags) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
            check_drafts(api)
        async with open_client(server, PATIENCE_S) as client:
            running = client.ask(max_tokens=200, ignore_eos=True)
            await client.until(lambda: running.text)
            late = client.ask(max_tokens=5, priority=5)
            await client.until_in_engine(running=1, waiting=1)
            early = client.ask(max_tokens=5, priority=-5)
            await client.until(lambda: early.is_done)
            assert not late.text
            await client.until(lambda: late.is_done)
            assert all(one.finish_reason == "length" for one in (running, early, late))


def check_drafts(api: openai.OpenAI) -> None:
    """What the model only repeats comes several tokens a step, each with its own logprobs."""
    numbers = "one two three four five six seven eight nine ten, "
    stream = api.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": f"Repeat this: {numbers * 2}one two three"}],
        temperature=0,
        max_tokens=60,
        logprobs=True,
        stream=True,
    )
    steps = [(one.delta.content or "", one.logprobs) for chunk in stream for one in chunk.choices]
    tokens = [[token.token for token in logprobs.content] for _, logprobs in steps if logprobs]
    assert max(map(len, tokens)) > 1
    text = "".join(content for content, _ in steps)
    assert "four five six" in text
    assert "".join(token for step in tokens for token in step).startswith(text)


async def test_what_one_engine_is_asked(smollm2) -> None:
    with launched("--restart-engine", "--drain-timeout", "60") as server:
        family = server.family
        async with open_client(server, PATIENCE_S) as client:
            # A client that leaves: the engine hears of it.
            async with trio.open_nursery() as nursery:
                leaving = Client(server.url, client._http, nursery)
                answer = leaving.ask(max_tokens=900, ignore_eos=True)
                await leaving.until(lambda: answer.text)
                nursery.cancel_scope.cancel()
            await client.until_idle()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
            ask_everything(api)
        async with open_client(server, 2 * PATIENCE_S) as client:
            # Another engine follows.
            os.kill(processes(server)["EngineCore"], signal.SIGKILL)
            await client.until_health(503, "restarting")
            await client.until_health(200)
            assert (await client.answered(max_tokens=5)).status == 200
            wait_gone(*family[1:])
            # A drain lets it finish.
            answer = client.ask(max_tokens=60, ignore_eos=True)
            await client.until(lambda: answer.text)
            family = server.family
            server.signal(signal.SIGTERM)
            await client.until(lambda: answer.is_done)
            assert answer.finish_reason == "length"
        assert await server.wait(PATIENCE_S) == 0
        wait_gone(*family)


def ask_everything(api: openai.OpenAI) -> None:
    """What the leg carries beside text."""
    ask = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = api.chat.completions.create(**ask)
    text = whole.choices[0].message.content
    assert text == "The capital of France is Paris."
    three = api.chat.completions.create(**ask, n=3)
    assert [one.message.content for one in three.choices] == [text] * 3
    stopped = api.chat.completions.create(**ask, stop=["France"])
    assert stopped.choices[0].message.content == "The capital of "
    logprobs = api.chat.completions.create(**ask, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert [len(one.top_logprobs) for one in logprobs.content] == [2] * 8
    prompt = api.chat.completions.create(**ask, extra_body={"prompt_logprobs": 1})
    assert len(prompt.model_extra["prompt_logprobs"]) == prompt.usage.prompt_tokens
    # Its cache on a CPU has blocks of 128 tokens.
    long = {**ask, "messages": [{"role": "user", "content": "sea " * 300}]}
    salted = {**long, "extra_body": {"cache_salt": "a"}}
    used = [api.chat.completions.create(**one).usage for one in (long, long, salted, salted)]
    cached = [one.prompt_tokens_details.cached_tokens for one in used]
    assert [one >= 128 for one in cached] == [False, True, False, True], cached
    for constraint, pattern in (
        ({"regex": "(yes|no)!"}, r"(yes|no)!"),
        ({"choice": ["Paris", "Rome"]}, r"Paris|Rome"),
        ({"json": {"enum": [{"a": 1}, {"a": 2}]}}, r'\{\s*"a":\s*[12]\s*\}'),
        ({"grammar": 'root ::= "a" | "b"'}, r"[ab]"),
    ):
        extra = {"structured_outputs": constraint}
        answer = api.chat.completions.create(**ask, extra_body=extra).choices[0].message.content
        assert re.fullmatch(pattern, answer, re.DOTALL), (constraint, answer)


async def test_a_start_that_fails_says_why(smollm2, tmp_path: Path) -> None:
    """The launcher's exit code says nothing, its last lines do."""
    vllm = VLLMConfig(python=VLLM_PYTHON, arguments=("--max-model-len", "999999999"))
    with pytest.raises(EngineStartError, match="max_model_len") as caught:
        async with open_llm("smollm2-135m", LLMConfig(vllm=vllm)):
            raise AssertionError("it cannot be ready")
    assert "\n" not in str(caught.value)


async def test_flags_and_places_that_are_none() -> None:
    with pytest.raises(InvalidRequestError, match="'--headless', which is always given"):
        VLLMConfig(arguments=("--headless",))
    vllm = VLLMConfig(python=Path("/nowhere/python"))
    with pytest.raises(EngineStartError, match="which is no program"):
        async with open_llm("smollm2-135m", LLMConfig(vllm=vllm)):
            raise AssertionError("it cannot be ready")
    with pytest.raises(InvalidRequestError, match="attach"):
        async with open_llm("smollm2-135m", LLMConfig(vllm=vllm), attach="tcp://127.0.0.1:0"):
            raise AssertionError("it is either")
    assert descendants(os.getpid()) == []
    assert resolve("smollm2-135m").is_dir()
