"""Fixtures of the engine's tests: one tiny random Llama, saved once, with its reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from engine_helpers import load_tiny_llama, make_core, save_tiny_llama

from trioleg.engine.core import EngineCore
from trioleg.engine.model import CausalLM


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and on a busy machine lose much to waiting for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="session")
def tiny_reference(tiny_dir: Path) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tiny_model(tiny_dir: Path) -> CausalLM:
    return load_tiny_llama(tiny_dir)


@pytest.fixture
def core(tiny_model: CausalLM) -> EngineCore:
    return make_core(tiny_model)
