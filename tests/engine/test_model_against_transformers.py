"""The model against an independent implementation: every architecture and option, logits within 1e-4 in
float32, and greedy tokens.

Requests of many lengths run together, in one piece or in chunks, so that decodes stand beside chunks, and
chunks begin and end inside blocks and windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_helpers import VOCAB, make_core, run_to_the_end, wire_request
from tiny_families import ARCHITECTURES, save_tiny

from trioleg.engine.kv_cache import BlockPool
from trioleg.engine.model import CausalLM
from trioleg.engine.model_config import read_model_config
from trioleg.engine.request import Request
from trioleg.engine.runner import ModelRunner
from trioleg.engine.scheduler import Scheduler
from trioleg.engine.weights import load_weights

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, untied": ("Llama", {"tie_word_embeddings": False}),
    "llama, one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama, as many kv heads": ("Llama", {"num_key_value_heads": 4}),
    "llama, nine and three heads": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "llama, head_dim 10": ("Llama", {"head_dim": 10}),
    "llama, theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "llama, one layer, eps": ("Llama", {"num_hidden_layers": 1, "rms_norm_eps": 1e-2}),
    "llama, attention_bias": ("Llama", {"attention_bias": True}),
    "llama, mlp_bias": ("Llama", {"mlp_bias": True}),
    "llama, linear rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window 1": ("Mistral", {"sliding_window": 1}),
    "mistral, window 7": ("Mistral", {"sliding_window": 7, "tie_word_embeddings": False}),
    "mistral, window 16": ("Mistral", {"sliding_window": 16, "head_dim": 12}),
    "mistral, window beyond": ("Mistral", {"sliding_window": 200}),
    "qwen2": ("Qwen2", {}),
    "qwen2, untied": ("Qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "qwen2, some windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2, linear rope": ("Qwen2", {"rope_parameters": LINEAR, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3, attention_bias": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "qwen3, alternating windows": ("Qwen3", {"use_sliding_window": True, "sliding_window": 11, "layer_types": ALTERNATING}),
    "qwen3, only windows": ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
}  # fmt: skip
# A prompt in one piece; chunks of a few blocks; chunks that end inside a block of four.
BUDGETS = [(1000, 16), (37, 8), (13, 4)]
# Tokens of each sequence that are fed back one by one.
DECODED = 6


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = read_model_config(path)
    weights = load_weights(path, config, dtype=dtype, device=torch.device("cpu"))
    return CausalLM(config, weights, max_model_len=config.max_position_embeddings)


def some_sequences() -> list[list[int]]:
    """Shorter and longer than any window here, and than the context that ``LLAMA3`` began with."""
    generator = torch.Generator().manual_seed(3)
    lengths = [7, 90, 16, 33, 8, 61, 24, 150]
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def run(
    model: CausalLM, sequences: list[list[int]], budget: int, block_size: int
) -> tuple[list[torch.Tensor], int]:
    """Each sequence's last logits, [1 + DECODED, vocab], and how many steps mixed decodes and chunks."""
    scheduler = Scheduler(
        BlockPool(128, block_size), max_num_seqs=16, max_num_batched_tokens=budget
    )
    runner = ModelRunner(model, num_blocks=128, block_size=block_size)
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    mixed = 0
    for index, sequence in enumerate(sequences):
        wire = wire_request(str(index), sequence[:-DECODED], max_tokens=100)
        scheduler.add(Request.from_wire(wire, vocab_size=VOCAB))
    while scheduler.requests:
        schedule = scheduler.schedule()
        requests, logits = runner.forward(schedule)
        mixed += len({chunk.count == 1 for chunk in schedule.chunks}) == 2
        for chunk in schedule.chunks:
            chunk.request.num_computed_tokens = chunk.end
        for request, row in zip(requests, logits, strict=True):
            index = int(request.request_id)
            rows[index].append(row)
            if request.num_tokens < len(sequences[index]):
                request.append(sequences[index][request.num_tokens], max_model_len=1000)
            else:
                scheduler.remove([request.request_id])
    return [torch.stack(one) for one in rows], mixed


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CausalLM, list[torch.Tensor]]:
    """A model of ours, and transformers' logits for ``some_sequences``."""
    family, changes = request.param
    path = tmp_path_factory.mktemp("model")
    reference = save_tiny(path, family, **changes)
    with torch.inference_mode():
        theirs = [reference(torch.tensor([one])).logits[0] for one in some_sequences()]
    return load(path), theirs


@pytest.mark.parametrize(("budget", "block_size"), BUDGETS)
def test_logits(pair: tuple[CausalLM, list[torch.Tensor]], budget: int, block_size: int) -> None:
    model, theirs = pair
    ours, mixed = run(model, some_sequences(), budget, block_size)
    assert mixed > 0 or budget == 1000
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.shape == (1 + DECODED, VOCAB)
        difference = (mine - right[-len(mine) :]).abs().max()
        assert difference < 1e-4, f"sequence of {len(right)} tokens"


@pytest.mark.parametrize("budget", [5, 64, 1024])
def test_greedy_tokens(
    tiny_model: CausalLM, tiny_reference: transformers.LlamaForCausalLM, budget: int
) -> None:
    core = make_core(tiny_model, max_num_batched_tokens=budget, num_blocks=200)
    prompts = [one[:50] for one in some_sequences()]
    for index, prompt in enumerate(prompts):
        core.add_request(wire_request(str(index), prompt, max_tokens=30))
    results = run_to_the_end(core)
    for index, prompt in enumerate(prompts):
        theirs = tiny_reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert results[str(index)].token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("together", [True, False])
def test_half_precision_stays_near(
    tmp_path: Path, family: str, dtype: torch.dtype, together: bool
) -> None:
    # Alone, the one row of a decode takes another product than the rows of a batch.
    switches = {
        "Llama": {"attention_bias": True, "mlp_bias": True},
        "Qwen3": {"attention_bias": True},
    }
    save_tiny(tmp_path, family, **switches.get(family, {}))
    sequences = some_sequences()[: None if together else 1]
    right, _ = run(load(tmp_path), sequences, 64, 16)
    got, _ = run(load(tmp_path, dtype), sequences, 64, 16)
    for mine, theirs in zip(got, right, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.1 * theirs.norm()
