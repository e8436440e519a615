from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_families import change_config

from trioleg.config import EngineConfig
from trioleg.engine import sizing
from trioleg.engine.core import EngineCore
from trioleg.engine.model_config import read_model_config
from trioleg.errors import InvalidRequestError

# The tiny model's context is 256 tokens; a block of it takes 3 layers · 16 tokens · 2 · 2 heads · 8 · 4 bytes.
BLOCK_BYTES = 3 * 16 * 2 * 2 * 8 * 4


def test_the_pool_is_what_the_limits_can_use(tiny_dir: Path) -> None:
    ready = EngineCore.load(tiny_dir, EngineConfig(device="cpu", max_num_seqs=5)).ready
    assert (ready.num_gpu_blocks, ready.max_model_len) == (5 * 16, 256)
    assert ready.dtype == "float32"


def test_the_pool_is_bounded_by_memory_and_the_context_by_the_pool(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "_CPU_BYTES", 10 * BLOCK_BYTES + 1)
    ready = EngineCore.load(tiny_dir, EngineConfig(device="cpu")).ready
    assert (ready.num_gpu_blocks, ready.max_model_len) == (10, 160)
    with pytest.raises(
        InvalidRequestError, match=r"max_model_len is 161; allowed: 2 to 160 .* 160"
    ):
        EngineCore.load(tiny_dir, EngineConfig(device="cpu", max_model_len=161))


def test_no_memory_at_all_is_said(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_CPU_BYTES", 1)
    with pytest.raises(InvalidRequestError, match="the key/value cache holds 0"):
        EngineCore.load(tiny_dir, EngineConfig(device="cpu"))


@pytest.mark.parametrize("asked", [None, 64])
def test_a_context_of_one_token_is_said(tiny_dir: Path, tmp_path: Path, asked: int | None) -> None:
    path = Path(shutil.copytree(tiny_dir, tmp_path / "model"))
    change_config(path, max_position_embeddings=1)
    with pytest.raises(InvalidRequestError, match=r"^no request fits.* context is 1 tokens, the"):
        EngineCore.load(path, EngineConfig(device="cpu", max_model_len=asked))


@pytest.mark.parametrize("asked", [1, 257])
def test_max_model_len_beyond_the_model_is_refused(tiny_dir: Path, asked: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"max_model_len is {asked}; allowed: 2 to 256"):
        EngineCore.load(tiny_dir, EngineConfig(device="cpu", max_model_len=asked))


def test_a_shorter_context_shrinks_the_pool(tiny_dir: Path) -> None:
    config = EngineConfig(device="cpu", max_model_len=20, max_num_seqs=3)
    ready = EngineCore.load(tiny_dir, config).ready
    assert (ready.num_gpu_blocks, ready.max_model_len) == (6, 20)


def test_half_precision_halves_a_block(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_CPU_BYTES", 10 * BLOCK_BYTES)
    model, device = read_model_config(tiny_dir), torch.device("cpu")
    blocks = [
        sizing.count_blocks(EngineConfig(), model, dtype, device)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert blocks == [10, 20]


@pytest.mark.parametrize("name", ["tpu", "mps", "cpu:x", "meta", ""])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"device is '{name}'; allowed: auto, cpu"):
        sizing.find_device(name)


def test_device_auto_is_one_that_works() -> None:
    assert torch.empty(1, device=sizing.find_device("auto")).device.type in ("cpu", "cuda")


def test_the_setting_goes_before_all_that_is_counted(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "_CPU_BYTES", 10 * BLOCK_BYTES)
    config = EngineConfig(device="cpu", num_gpu_blocks_override=12)
    assert EngineCore.load(tiny_dir, config).ready.num_gpu_blocks == 12
