"""``trioleg bench leg``, small: ours and the floor, with every figure, nothing lost, and no process left."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner
from programs import END_S, TRIOLEG, descendants, running, wait_until

from trioleg import cli
from trioleg.bench.leg import PARTS, PEERS, AskedLeg, run_leg
from trioleg.bench.leg_control import ANSWER_S
from trioleg.bench.leg_figures import Figures
from trioleg.bench.leg_saturation import find_saturation
from trioleg.bench.leg_streams import Burst, Run, leg_token_ids, open_clients
from trioleg.bench.leg_subjects import Leg, serving
from trioleg.errors import TriolegError


def test_every_figure_is_there_for_both_and_no_process_is_left(smollm2, tmp_path: Path) -> None:
    small = ("--streams", "1", "--streams", "80", "--runs", "2", "--seconds", "0.5")
    parts = ("--only", "cost", "--only", "start")
    arguments = ("bench", "leg", *small, *parts, "--json", "--out", str(tmp_path))
    with running(*TRIOLEG, *arguments) as program:
        code = program.wait(10 * END_S)
        wait_until(lambda: not descendants(program.process.pid))
    assert code == 0, program.said()
    report = json.loads(program.stdout)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "cost.svg").exists()
    series = {one["what"]: one for one in report["series"]}
    for one in series.values():
        assert [len(runs) for runs in one["runs"].values()] == [2, 2], one
    for streams in ("1 stream", "80 streams"):
        assert series[f"frames of tokens, {streams}"]["runs"]["floor"] == [100.0, 100.0]
        # Ours merges what comes while it is busy, which a loaded machine may bring about.
        assert min(series[f"frames of tokens, {streams}"]["runs"]["trioleg"]) > 50
        for subject in ("trioleg", "floor"):
            assert min(series[f"processor a token, {streams}"]["runs"][subject]) > 0
            assert min(series[f"first frame, p50, {streams}"]["runs"][subject]) > 0
    assert series["memory, ready"]["ratio"]["median"] > 1


@pytest.fixture
def leg(smollm2: Path) -> Leg:
    return Leg(smollm2, leg_token_ids(smollm2))


@pytest.mark.parametrize("name", ["trioleg", "floor"])
async def test_a_burst_comes_whole(leg: Leg, name: str) -> None:
    async with open_clients(leg) as clients, serving(name, leg) as subject:
        run = Run(subject, clients, leg)
        await run.open(3)
        burst = await run.burst(100.0, 40)
        assert burst.tokens == 3 * 40
        assert 0 < burst.frames <= burst.tokens
        # The text is looked at: all of 42 tokens, a first one, the burst and a last one.
        assert (await run.finish()).frames_of_tokens > 0.5


async def test_another_text_than_was_sent_is_an_error(leg: Leg) -> None:
    others = dataclasses.replace(leg, token_ids=leg.token_ids[1:])
    async with open_clients(leg) as clients, serving("floor", leg) as subject:
        run = Run(subject, clients, others)
        await run.open(1)
        with pytest.raises(TriolegError, match="floor: the text of a stream of 2 tokens is not"):
            await run.finish()


async def test_a_refused_stream_is_an_error(leg: Leg) -> None:
    async with open_clients(leg) as clients, serving("trioleg", leg) as subject:
        os.kill(subject.program.pid, signal.SIGTERM)
        run = Run(subject, clients, leg)
        with pytest.raises(TriolegError, match=r"refused|reset|ended before its time"):
            await run.open(1)


@dataclasses.dataclass
class Limited:
    """A server, as the search sees one: beyond its limit it merges, or is late if it never does."""

    limit: float
    streams: int = 100
    merges: bool = True
    asked: list[float] = dataclasses.field(default_factory=list)

    async def burst(self, rate: float, steps: int) -> Burst:
        await trio.lowlevel.checkpoint()
        self.asked.append(rate)
        tokens = steps * self.streams
        over = max(1.0, rate * self.streams / self.limit)
        frames = tokens / over if self.merges else tokens
        return Burst(tokens, int(frames), steps / rate * (1 if self.merges else over))


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("rate", [10.0, 50.0, 3000.0])
async def test_the_search_finds_the_limit(rate: float, merges: bool) -> None:
    server: Any = Limited(20_000.0, merges=merges)
    found = await find_saturation(server, rate)
    assert found == pytest.approx(20_000.0, rel=0.06)
    assert len(server.asked) <= 12


async def test_the_search_ends_with_a_server_that_lets_nothing_through() -> None:
    server: Any = Limited(1e-6)
    assert await find_saturation(server, 50.0) == 0.0
    assert len(server.asked) <= 12


def test_a_figure_is_compared_to_the_peers_that_are_there() -> None:
    figures = Figures(["floor"])
    for subject, figure in (("trioleg", 3.0), ("floor", 2.0)):
        figures.note(subject, "cost", "µs", figure, goals={"vllm": 0.33, "floor": 1.5})
    (one,) = figures.series
    assert (one.against, one.goal, one.is_met) == ("floor", 1.5, True)
    both = Figures(["vllm", "floor"])
    both.note("trioleg", "cost", "µs", 3.0, goals={"vllm": 0.33, "floor": 1.5})
    both.note("vllm", "cost", "µs", 10.0, goals={"vllm": 0.33, "floor": 1.5})
    assert [(one.against, one.is_met) for one in both.series] == [("vllm", True), ("floor", None)]


def _refused(*arguments: str) -> str:
    """What is said by a command that starts nothing."""
    said = CliRunner().invoke(cli.commands, ["bench", *arguments])
    assert said.exit_code == 2, said.output
    return " ".join(said.output.split())


@pytest.mark.parametrize("option", ["--rate", "--token-rate", "--seconds"])
@pytest.mark.parametrize("value", ["nan", "inf", "0"])
def test_an_option_that_is_no_such_number(option: str, value: str) -> None:
    assert f"Invalid value for '{option}': {float(value)} is not" in _refused("leg", option, value)


def test_no_window_is_longer_than_its_programs_wait() -> None:
    assert "0.1<=x<=100" in _refused("leg", "--seconds", "101")
    assert ANSWER_S > 110


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--streams", "4", "--only", "idle"), "--streams is for --only cost"),
        (("--rate", "4", "--only", "length"), "--rate is for --only cost or saturation"),
        (("--token-rate", "9", "--only", "saturation"), "--token-rate is for --only cost"),
        (("--seconds", "4", "--only", "start"), "--seconds is for --only cost or length"),
        (("--vllm-python", "python3"), "--vllm-python is for --peer vllm"),
    ],
)
def test_an_option_that_nothing_takes(arguments: tuple[str, ...], why: str) -> None:
    assert why in _refused("leg", *arguments)


def test_what_is_given_twice_is_measured_once(monkeypatch) -> None:
    asked: list[AskedLeg] = []

    async def keep(_model: str, leg: AskedLeg, _progress: Any) -> None:
        await trio.lowlevel.checkpoint()
        asked.append(leg)
        raise TriolegError("enough")

    monkeypatch.setattr("trioleg.bench.leg.run_leg", keep)
    twice = ("--peer", "floor", "--streams", "4", "--only", "cost") * 2
    CliRunner().invoke(cli.commands, ["bench", "leg", *twice])
    assert [(one.peers, one.streams, one.parts) for one in asked] == [(("floor",), (4,), ("cost",))]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (AskedLeg(streams=(1,), rate=0.1, seconds=0.1), r"--seconds is 0\.1.*1 stream.*20 seconds"),
        (AskedLeg(streams=(1, 10_000), token_rate=1.0), r"10000 streams there are 0\.0001 steps"),
    ],
)
async def test_a_window_without_a_gap_is_refused(asked: AskedLeg, why: str) -> None:
    with pytest.raises(TriolegError, match=why):
        await run_leg("smollm2-135m", asked, lambda _: None)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (AskedLeg(streams=(900,), parts=("cost",)), "--streams is 900: 900 streams need 1028"),
        (AskedLeg(parts=("idle",)), "--only is idle: 4096 streams need 4224"),
    ],
)
async def test_too_few_open_files_are_told_before_anything_starts(
    monkeypatch, asked: AskedLeg, why: str
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    with pytest.raises(TriolegError, match=rf"{why} open files .*; allowed here: 1024"):
        await run_leg("smollm2-135m", asked, lambda _: None)


async def test_a_window_in_which_nothing_comes_is_an_error(leg: Leg) -> None:
    async with open_clients(leg) as clients, serving("floor", leg) as subject:
        run = Run(subject, clients, leg)
        await run.open(1)
        with pytest.raises(TriolegError, match=r"no token came within 0\.1 s"):
            await run.window(0.05, 0.1, 0.5)


@pytest.mark.parametrize(
    ("python", "why"),
    [
        (None, "is not given"),
        ("no/python", "cannot be run .*whose env"),
        ("true", "does not tell vLLM's version"),
        ("false", "has no vLLM"),
    ],
)
async def test_vllm_needs_an_interpreter_that_has_it(python: str | None, why: str) -> None:
    asked = AskedLeg(peers=("vllm",), vllm_python=python)
    with pytest.raises(TriolegError, match=f"--vllm-python.*{why}"):
        await run_leg("smollm2-135m", asked, lambda _: None)


def test_the_options_name_every_part_and_peer() -> None:
    text = CliRunner().invoke(cli.commands, ["bench", "leg", "--help"]).output
    assert all(name in text for name in (*PARTS, *PEERS))
    wrong = CliRunner().invoke(cli.commands, ["bench", "leg", "--only", "all"])
    assert wrong.exit_code == 2
    assert all(f"'{name}'" in wrong.output for name in PARTS)
