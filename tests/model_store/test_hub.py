"""Models of the hub: the real client in a program of its own, against a small hub on this machine."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from programs import ROOT, TRIOLEG, alive, descendants, running, wait_until
from small_hub import COMMIT, SmallHub, small_hub

from trioleg.errors import ModelStoreError
from trioleg.model_store import hub_fetch, is_missing, pull, resolve

REPO = "owner/tiny-model"
NEEDED = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": b'{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}',
    "part-1.safetensors": b"1" * 70_000,
    "part-2.safetensors": b"2" * 70_000,
}
NOT_NEEDED = {
    "README.md": b"#",
    "pytorch_model.bin": b"pickle",
    "model.Q4_0.gguf": b"GGUF",
    "original/consolidated.safetensors": b"other",
    "original/params.json": b"{}",
    "consolidated.safetensors": b"again",
    "onnx/model.onnx": b"onnx",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache folder, empty, for this process and those that it starts."""
    folder = tmp_path / "hub"
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # The library reads it when it is imported, and it has been.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    with small_hub() as hub:
        hub.files[REPO] = NEEDED | NOT_NEEDED
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 1 of this machine: nobody listens there."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")


def test_a_model_is_fetched_once_and_found_without_a_network(
    hub: SmallHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_missing(REPO)
    with pytest.raises(ModelStoreError, match=f"hub's cache, {cache}.*trioleg pull {REPO}"):
        resolve(REPO)
    stages: list[tuple[str, int, int]] = []
    directory = pull(REPO, progress=lambda *report: stages.append(report))
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == NEEDED
    assert directory == cache / f"models--owner--tiny-model/snapshots/{COMMIT}"
    assert stages[0] == ("download", 0, 0)
    assert stages[-1] == ("download", 140_000, 140_000)

    assert resolve(REPO) == resolve(f"{REPO}@main") == resolve(f"{REPO}@{COMMIT}") == directory
    assert is_missing(f"{REPO}@v1")
    assert pull(f"{REPO}@v1") == directory == resolve(f"{REPO}@v1")
    count = len(hub.asked)
    assert not is_missing(REPO)
    assert len(hub.asked) == count
    _no_hub(monkeypatch)
    assert pull(REPO) == directory


def test_a_download_that_lost_a_file_is_told_and_completed(hub: SmallHub) -> None:
    directory = pull(REPO)
    (directory / "part-2.safetensors").unlink()
    assert is_missing(REPO)
    with pytest.raises(ModelStoreError, match=r"nor \(whole\) in the hub's cache"):
        resolve(REPO)
    assert resolve(REPO, weights=False) == directory
    assert not is_missing(REPO, weights=False)
    pull(REPO)
    assert resolve(REPO) == directory


def test_a_directory_of_the_same_name_wins(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / REPO
    own.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (own / file).touch()
    assert not is_missing(REPO)
    assert resolve(REPO) == Path(REPO)
    assert hub.asked == []


def _gated(hub: SmallHub) -> None:
    hub.gated.add(REPO)


def _without_tokenizer(hub: SmallHub) -> None:
    hub.files[REPO] = {name: text for name, text in NEEDED.items() if name != "tokenizer.json"}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("owner/none", lambda hub: None, "no such model, or it is private; .*HF_TOKEN"),
        ("owner/na--me", lambda hub: None, "no model of the hub has such a name"),
        (f"{REPO}@v9", lambda hub: None, "no revision 'v9'"),
        (REPO, _gated, f"ask for it at http.*/{REPO}, then set HF_TOKEN"),
        (REPO, _without_tokenizer, "has no tokenizer.json"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    hub: SmallHub, name: str, change: Callable[[SmallHub], None], said: str
) -> None:
    change(hub)
    with pytest.raises(ModelStoreError, match=f"^{name}: .*{said}") as caught:
        pull(name)
    assert "\n" not in str(caught.value)
    assert not any(path.endswith("part-1.safetensors") for path in hub.asked)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, b"<html>", "answers with status 500; the fault is its own: try again later"),
        (503, b"", "answers with status 503; the fault is its own"),
        (
            429,
            b"",
            "answers with status 429; it wants fewer requests: wait a while, or set HF_TOKEN",
        ),
        (401, b"", "answers with status 401; set HF_TOKEN"),
        (403, b"", "answers with status 403; set HF_TOKEN"),
        (404, b"", "answers with status 404; check the model's name and HF_ENDPOINT"),
        (
            200,
            b"{}",
            r"an answer that no Hugging Face hub gives \(KeyError: .*\); check HF_ENDPOINT",
        ),
        (200, b"[1, 2", r"no Hugging Face hub gives \(JSONDecodeError: "),
        (200, b"[" * 100_000, r"no Hugging Face hub gives \(RecursionError: "),
    ],
)
def test_a_hub_that_is_broken_is_one_sentence(
    hub: SmallHub, status: int, body: bytes, said: str
) -> None:
    hub.broken = (status, body)
    with pytest.raises(ModelStoreError, match=rf"^{REPO}: {hub.url} (answers|gives) ") as caught:
        pull(REPO)
    assert re.search(said, str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_token_opens_what_is_gated(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(REPO)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (pull(REPO) / "config.json").is_file()


def test_a_hub_that_cannot_be_reached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_hub(monkeypatch)
    with pytest.raises(ModelStoreError, match=r"http://127\.0\.0\.1:1 cannot be reached \(.+\)"):
        pull(REPO)


def test_offline_is_respected(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelStoreError, match="HF_HUB_OFFLINE forbids"):
        pull(REPO)
    assert hub.asked == []


def test_a_full_disk_is_told() -> None:
    said = hub_fetch.sentence(OSError(errno.ENOSPC, "No space left on device"), REPO, "main")
    assert said.startswith("no space is left in ")
    assert "HF_HUB_CACHE" in said


def test_a_pull_that_is_interrupted_ends_its_download(
    hub: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*args, **options))
        return started[0]

    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        pull(REPO, progress=interrupt)
    assert started[0].returncode is not None


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_program_ends_the_download_too(
    hub: SmallHub, number: signal.Signals, code: int
) -> None:
    hub.slow.set()
    with running(*TRIOLEG, "pull", REPO) as program:
        wait_until(lambda: any(path.endswith("part-1.safetensors") for path in hub.asked))
        (child,) = descendants(program.process.pid)
        program.process.send_signal(number)
        assert program.wait() == code
        wait_until(lambda: not alive(child))
    assert "Traceback" not in program.stderr


def test_a_download_that_dies_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(
        ModelStoreError, match=rf"^{REPO}: the download ended early \(exit code 1\)"
    ):
        pull(REPO)


def test_looking_for_a_model_of_the_hub_loads_little(cache: Path) -> None:
    code = (
        "import sys; from trioleg import model_store; assert model_store.is_missing('owner/name');"
        "print(set(sys.modules) & {'httpx', 'httpx2', 'requests', 'tqdm', 'hf_xet', 'torch'})"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert output.stdout == "set()\n"
