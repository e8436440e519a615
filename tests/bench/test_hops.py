"""``trioleg bench hops``, small: every hop has its figures, alone and in the whole, and no process is left."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from types import CodeType

import pytest
from programs import END_S, TRIOLEG, descendants, running, wait_until

from trioleg.bench.hop_leg import Steps, cpu_of_steps
from trioleg.bench.hop_parts import ASIDE, HOPS
from trioleg.bench.hops import TEXT, load_tokenizer, work_of
from trioleg.bench.sampler import sampling


def _bench(*options: str) -> dict:
    with running(*TRIOLEG, "bench", "hops", "--json", *options) as program:
        code = program.wait(10 * END_S)
        wait_until(lambda: not descendants(program.process.pid))
    assert code == 0, program.said()
    return json.loads(program.stdout)


def test_every_hop_is_measured_and_no_process_is_left(smollm2, tmp_path: Path) -> None:
    options = ("--rounds", "2", "--tokens", "100", "--batch", "1", "--batch", "8")
    report = _bench(*options, "--out", str(tmp_path))
    assert report["settings"] == {"batches": [1, 8], "rounds": 2, "tokens": 100}
    assert report["machine"]["versions"]["trio"]
    for batch in (1, 8):
        figures = {
            one["what"].partition(",")[0]: one for one in report["series"] if one["at"] == batch
        }
        assert set(figures) == {
            *HOPS,
            *(f"aside: {hop}" for hop in ASIDE),
            "sum of the hops",
            "the whole",
            "of it the engine's end",
            "ZeroMQ's threads",
        }
        for one in figures.values():
            assert len(one["runs"]["trioleg"]) == 2
        # Differences of a few microseconds may come out below 0 on a machine under load; these are none.
        for hop in ("encode", "decode", "detokenize", "put", "receive", "frame", "write"):
            assert min(figures[hop]["runs"]["trioleg"]) > 0, hop
        sums = figures["sum of the hops"]["runs"]
        assert sums["whole"] == figures["the whole"]["runs"]["trioleg"]
        for number in range(2):
            hops = sum(figures[hop]["runs"]["trioleg"][number] for hop in HOPS)
            assert sums["trioleg"][number] == pytest.approx(hops)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"report.json", "hops.svg", "hops-of-one.svg", "sum.svg", "aside.svg"}
    said = "".join(ElementTree.parse(tmp_path / "sum.svg").getroot().itertext()).split("\n")
    assert {"sum of the hops", "the whole"} <= {line.strip() for line in said}
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_the_profile_names_functions_of_the_front_end(smollm2) -> None:
    report = _bench("--profile", "--rounds", "1", "--tokens", "1000", "--batch", "32")
    figures = {one["what"]: one["runs"]["32 a step"] for one in report["series"]}
    assert all(len(runs) == 1 and runs[0] >= 0 for runs in figures.values())
    assert sum(runs[0] for runs in figures.values()) > 0
    # The one system call a token: nothing is dearer.
    assert any(name.startswith("trioleg/server/") for name in figures)
    assert "all other functions" in figures
    assert not any(name.startswith("/") for name in figures if "<" not in name)


async def test_steps_are_made_by_another_thread_and_all_of_them() -> None:
    seen = []
    cpu = await cpu_of_steps(seen.append, Steps(5, 0.001))
    assert seen == [0, 1, 2, 3, 4]
    assert cpu.engine == 0


def test_a_stretch_of_steps_comes_in_the_same_rhythm_each_time() -> None:
    steps = Steps(20, 0.003)
    assert list(steps.intervals()) == list(steps.intervals())
    assert all(0.002 <= one <= 0.004 for one in steps.intervals())


def test_the_work_is_the_text_from_several_places(smollm2) -> None:
    tokenizer = load_tokenizer("smollm2-135m")
    work = work_of(tokenizer, 3, 300)
    assert work.num_tokens == 300
    first, second = ([step[stream] for step in work.token_ids] for stream in (0, 1))
    assert first != second
    assert tokenizer.decode(first[:20])[:20] == TEXT[:20]
    assert [len(message.outputs) for message in work.messages()] == [3] * 100


def _spin(until_s: float) -> None:
    while time.thread_time() < until_s:
        pass


def test_samples_fall_where_the_time_goes() -> None:
    samples: Counter[CodeType] = Counter()
    with sampling(samples):
        # Processor time of this thread, so that what else the machine does is no matter.
        _spin(time.thread_time() + 0.3)
    assert samples.total() > 10
    assert samples[_spin.__code__] > samples.total() / 2
