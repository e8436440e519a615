"""The study as it is shown and kept: the terminal, Markdown, JSON."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from compare_outcomes import made_study
from rich.console import Console

from trioleg.compare.markdown import to_markdown
from trioleg.compare.study import load, write_json
from trioleg.compare.table import show_study
from trioleg.errors import InvalidRequestError


def _shown(*, details: bool) -> list[str]:
    out = io.StringIO()
    show_study(made_study(), Console(file=out, width=110), details=details)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_one_row_a_scenario_and_one_column_a_leg() -> None:
    assert _shown(details=False)[:11] == COMPACT


COMPACT = [
    "Endings",
    "scenario  trioleg         asyncio                          vllm      trioleg is worse in",
    "leaves    ✓ told 5.00 ms  ✗ leak never told (1 of 3 runs)  – absent  engine told after",
    "",
    "Engines",
    "scenario  trioleg                                asyncio                        vllm  trioleg is worse in",
    "dies      ✓ gone 1.50 s, ! failed (1 of 3 runs)  ✓ health noticed after 750 ms        runs, tokens a second",
    "",
    "Where trioleg is worse than another leg:",
    "  leaves: engine told after 5.00 ms, against asyncio 1.50 ms",
    "  dies: failed (1 of 3 runs), which asyncio did not",
]


def test_details_hold_every_line() -> None:
    shown = _shown(details=True)
    assert "leaves: Who hears of a client that leaves?" in shown
    assert "Worse: trioleg: engine told after 5.00 ms, against asyncio 1.50 ms." in shown
    assert "Worse: asyncio: leaks (2 of 3 runs), which trioleg does not." in shown
    assert "trioleg: Run 3 failed: TriolegError: it was not ready" in shown
    assert "vllm: It has no | such thing." in shown
    assert any(line.split() == ["lines", "of", "code", "10", "1,200"] for line in shown)


def test_markdown_is_read_across_and_then_down() -> None:
    lines = to_markdown(made_study()).splitlines()
    place = lines.index("## Endings")
    assert lines[place + 2 : place + 5] == [
        "| scenario | trioleg | asyncio | vllm | trioleg is worse in |",
        "|---|---|---|---|---|",
        "| [leaves](#leaves) | ✓ told 5.00 ms | ✗ leak never told (1 of 3 runs) | – absent | engine told after |",
    ]
    place = lines.index("### leaves")
    assert lines[place + 2 : place + 17] == [
        "Who hears of a client that leaves?",
        "",
        "|  | trioleg | asyncio | vllm |",
        "|---|---|---|---|",
        "| seen by the client | nothing | nothing |  |",
        "| verdict | clean | leak (2 of 3 runs) |  |",
        "| left behind |  | tasks 0–2 |  |",
        "| engine told after | 5.00 ms (4.00–6.00) | 1.50 ms (1.00–2.00) (2 of 3 runs) |  |",
        "| engine never told |  | never (1 of 3 runs) |  |",
        "",
        "- Worse: **trioleg** engine told after 5.00 ms, against asyncio 1.50 ms.",
        "- Worse: **asyncio** leaks (2 of 3 runs), which trioleg does not.",
        "- Worse: **asyncio** never told the engine (1 of 3 runs), which trioleg did.",
        "- Worse: **vllm** has no such thing, which trioleg and asyncio have.",
        "- asyncio: One remark.",
    ]
    assert "- vllm: It has no \\| such thing." in lines
    assert "![trioleg's tasks](timelines/leaves-trioleg.svg)" in lines


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    write_json(made_study(), tmp_path / "study.json")
    again = load(tmp_path / "study.json")
    assert again == made_study()
    assert to_markdown(again) == to_markdown(made_study())


def test_a_study_can_be_narrowed() -> None:
    study = made_study()
    study.narrow(["dies"], ["asyncio"])
    assert study.settings.legs == ["asyncio"]
    assert [(one.scenario, one.leg) for one in study.outcomes] == [("dies", "asyncio")]
    assert (study.failed, study.recordings, study.sources) == ([], [], [])


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"settings": 3}'])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"--from is .*other\.json.*allowed: a study"):
        load(path)
