"""The report: medians, ratios run by run, goals, the table, the files."""

from __future__ import annotations

import io
import sys
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure
from rich.console import Console

from trioleg.bench.machine import Machine, read_machine
from trioleg.bench.measurement import about_minutes
from trioleg.bench.plots import draw_lines
from trioleg.bench.report import Chart, Report, Series, Spread, show_report, write_report
from trioleg.cli import commands
from trioleg.errors import TriolegError

_MACHINE = Machine("A processor", 2, 7.8, "Linux 6.1", "3.11.2", {"trio": "0.35.0"})
_COST = Chart("cost", "What a token costs", "streams")
_HOPS = Chart("hops", "What a hop costs", "tokens a step", stacked=True)


def _cost(**more) -> Series:
    runs = {"trioleg": [20.0, 30.0, 22.0], "vllm": [80.0, 60.0, 66.0]}
    return Series("cost of a token, 64 streams", "µs", runs=runs, **more)


def _report() -> Report:
    series = [_cost(goal=0.33, against="vllm", chart=_COST, at=64)]
    series.append(Series("cost, 1 stream", "µs", runs={"trioleg": [31.5]}, chart=_COST, at=1))
    for at in (1, 16):
        for layer in ("decode", "write"):
            runs = {"trioleg": [1.0, 2.0, 1.5]}
            series.append(Series(layer, "µs", runs=runs, chart=_HOPS, at=at, layer=layer))
        runs = {"trioleg": [3.0, 3.5]}
        series.append(Series(f"whole, {at}", "µs", runs=runs, chart=_HOPS, at=at))
    series.append(Series("resident memory", "MB", runs={"trioleg": [90.0], "vllm": [740.0]}))
    return Report("trioleg bench leg", {"rounds": 3}, _MACHINE, series, ["Cores are shared."])


def test_a_figure_is_the_median_with_its_spread() -> None:
    assert _cost().spread("trioleg") == Spread(22.0, 20.0, 30.0)
    assert _cost().spread("floor") is None


def test_a_ratio_is_of_runs_with_the_same_number() -> None:
    # 0.25, 0.5 and 0.333: not 22 by 66.
    assert _cost().ratio("vllm") == Spread(22 / 66, 0.25, 0.5)
    one = Series("x", "µs", runs={"trioleg": [1.0, 9.0], "vllm": [2.0]})
    assert one.ratio("vllm") == Spread(0.5, 0.5, 0.5)
    assert one.ratio("floor") is None
    assert Series("x", "µs", runs={"trioleg": [1.0], "vllm": [0.0]}).ratio("vllm") is None


@pytest.mark.parametrize(
    ("goal", "less_is_better", "is_met"),
    [(0.34, True, True), (0.33, True, False), (0.33, False, True), (0.34, False, False)],
)
def test_a_goal_is_met_by_the_median_of_the_ratios(goal, less_is_better, is_met) -> None:
    one = _cost(goal=goal, against="vllm", less_is_better=less_is_better)
    assert one.is_met is is_met


def test_without_goal_or_peer_nothing_is_met_or_missed() -> None:
    assert _cost().is_met is None
    assert _cost(against="vllm").is_met is None
    assert _cost(goal=1.0, against="floor").is_met is None


def test_the_summary_has_every_run() -> None:
    summary = msgspec.json.decode(msgspec.json.encode(_report().summary()))
    assert summary["settings"] == {"rounds": 3}
    assert summary["machine"]["versions"] == {"trio": "0.35.0"}
    first = summary["series"][0]
    assert first["runs"] == {"trioleg": [20.0, 30.0, 22.0], "vllm": [80.0, 60.0, 66.0]}
    assert first["subjects"]["vllm"] == {"median": 66.0, "min": 60.0, "max": 80.0}
    assert first["ratio"]["max"] == 0.5
    assert first["is_met"] is False
    assert summary["series"][-1]["ratio"] is None


def test_the_table_has_a_column_for_each_subject() -> None:
    out = io.StringIO()
    show_report(_report(), Console(file=out, width=150))
    said = out.getvalue()
    assert "22.0 (20.0–30.0)" in said
    assert "66.0 (60.0–80.0)" in said
    assert "0.333 (0.250–0.500) of vllm" in said
    assert "≤ 0.33" in said
    assert "Cores are shared." in said
    assert "A processor, 2 cores, 7.8 GB, Linux 6.1, Python 3.11.2, trio 0.35.0" in said


def test_the_files_are_the_same_for_the_same_figures(tmp_path) -> None:
    for name in ("first", "second"):
        write_report(_report(), tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    # Not what has no chart: of its unit there may be figures that have nothing else in common.
    assert names == ["cost.svg", "hops.svg", "report.json"]
    for name in names:
        content = (tmp_path / "first" / name).read_bytes()
        assert content == (tmp_path / "second" / name).read_bytes()
        assert len(content) < 50_000
    assert msgspec.json.decode((tmp_path / "first/report.json").read_bytes())["series"]


def test_a_plot_says_what_it_shows(tmp_path) -> None:
    write_report(_report(), tmp_path)
    texts = {
        path.stem: set("".join(ElementTree.parse(path).getroot().itertext()).split("\n"))
        for path in tmp_path.glob("*.svg")
    }
    assert {"What a token costs", "streams", "µs", "trioleg", "vllm"} <= _words(texts["cost"])
    assert {"decode", "write", "whole", "tokens a step"} <= _words(texts["hops"])


def test_a_line_of_a_subject_is_called_what_the_chart_calls_it(tmp_path) -> None:
    chart = Chart("sum", "All of it", "tokens", names=(("trioleg", "sum of the hops"),))
    series = [
        Series("sum", "µs", runs={"trioleg": [3.0], "vllm": [4.0]}, chart=chart, at=1),
        Series("send", "µs", runs={"trioleg": [1.0]}, chart=chart, at=1, layer="send"),
    ]
    write_report(Report("", {}, _MACHINE, series), tmp_path)
    said = "".join(ElementTree.parse(tmp_path / "sum.svg").getroot().itertext())
    words = _words(set(said.split("\n")))
    assert {"sum of the hops", "vllm", "send"} <= words
    assert "trioleg" not in words


def test_a_run_near_zero_does_not_stretch_the_axis() -> None:
    chart = Chart("gap", "Gaps", "streams")
    series = [
        Series("a", "ms", runs={"trioleg": [1.0, 1e-9, 1.1]}, chart=chart, at=1),
        Series("b", "ms", runs={"trioleg": [100.0]}, chart=chart, at=64),
    ]
    axes = Figure().add_subplot()
    draw_lines(axes, chart, series)
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[0] == 0.5


def test_plots_of_an_earlier_report_do_not_stay_and_other_files_do(tmp_path) -> None:
    write_report(_report(), tmp_path)
    (tmp_path / "mine.svg").write_text("not ours")
    write_report(Report("", {}, _MACHINE, _report().series[:1]), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"cost.svg", "mine.svg", "report.json"}


@pytest.mark.parametrize("earlier", ['{"series": [{"plot": "../x.svg"}]}', "[]", "no report"])
def test_a_report_that_is_none_of_ours_removes_nothing(tmp_path, earlier) -> None:
    (tmp_path / "x.svg").write_text("not ours")
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "report.json").write_text(earlier)
    write_report(Report("", {}, _MACHINE, []), folder)
    assert (tmp_path / "x.svg").exists()


def _words(lines: set[str]) -> set[str]:
    return {line.strip() for line in lines}


def test_a_missing_matplotlib_is_told_with_the_remedy(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(TriolegError, match=r"pip install 'trioleg\[bench\]'"):
        write_report(_report(), tmp_path)


def test_this_machine_is_described_without_a_name_of_it() -> None:
    machine = read_machine(("trio", "no-such-package"), {"vllm": "0.32.0"})
    assert set(machine.versions) >= {"trio", "vllm"}
    assert "no-such-package" not in machine.versions
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_gb > 0
    assert f"vllm {machine.versions['vllm']}" in machine.line()


@pytest.mark.parametrize("name", ["leg", "hops", "engine"])
def test_a_folder_that_cannot_be_written_is_told_before_anything_starts(tmp_path, name) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "report"
    said = CliRunner().invoke(commands, ["bench", name, "--out", str(out)])
    assert said.exit_code == 2
    assert "cannot be written (Not a directory)" in " ".join(said.output.split())


@pytest.mark.parametrize(("seconds", "said"), [(3, "1 minute"), (61, "2 minutes")])
def test_a_time_is_told_in_minutes(seconds, said) -> None:
    assert about_minutes(seconds) == f"this takes about {said}"


def test_each_bench_is_a_command_of_the_group() -> None:
    said = CliRunner().invoke(commands, ["bench", "--help"]).output
    for name in ("churn", "endings", "load", "stalled"):
        assert f"\n  {name} " in said
