"""The model against an independent implementation: logits within 1e-4 in float32, and greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_helpers import (
    VOCAB,
    load_tiny_llama,
    make_core,
    run_to_the_end,
    save_tiny_llama,
    wire_request,
)

from trioleg.engine.kv_cache import BlockPool
from trioleg.engine.model import LlamaModel
from trioleg.engine.request import Request
from trioleg.engine.runner import ModelRunner
from trioleg.engine.scheduler import Scheduler

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 4},
    "nine and three heads": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "a head_dim of its own": {"head_dim": 16},
    "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "one layer": {"num_hidden_layers": 1, "rms_norm_eps": 1e-2},
}


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[LlamaModel, transformers.LlamaForCausalLM]:
    reference = save_tiny_llama(tmp_path, **request.param)
    return load_tiny_llama(tmp_path), reference


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def all_logits(
    model: LlamaModel, sequences: list[list[int]], *, budget: int, block_size: int
) -> dict[str, torch.Tensor]:
    """Each sequence's logits for its first token and for each that is then fed back, [steps, vocab]."""
    scheduler = Scheduler(
        BlockPool(128, block_size), max_num_seqs=16, max_num_batched_tokens=budget
    )
    runner = ModelRunner(model, num_blocks=128, block_size=block_size)
    rows: dict[str, list[torch.Tensor]] = {}
    for index, sequence in enumerate(sequences):
        wire = wire_request(str(index), sequence[:-2] or sequence, max_tokens=100)
        scheduler.add(Request.from_wire(wire, vocab_size=VOCAB))
    while scheduler.requests:
        schedule = scheduler.schedule()
        requests, logits = runner.forward(schedule)
        for chunk in schedule.chunks:
            chunk.request.num_computed_tokens = chunk.end
        for request, row in zip(requests, logits, strict=True):
            sequence = sequences[int(request.request_id)]
            rows.setdefault(request.request_id, []).append(row)
            if request.num_tokens < len(sequence):
                request.append(sequence[request.num_tokens], max_model_len=1000)
            else:
                scheduler.remove([request.request_id])
    return {request_id: torch.stack(logits) for request_id, logits in rows.items()}


@pytest.mark.parametrize(("budget", "block_size"), [(1000, 16), (13, 4)])
def test_logits(
    pair: tuple[LlamaModel, transformers.LlamaForCausalLM], budget: int, block_size: int
) -> None:
    model, reference = pair
    sequences = prompts(9, 60)
    ours = all_logits(model, sequences, budget=budget, block_size=block_size)
    for index, sequence in enumerate(sequences):
        with torch.inference_mode():
            theirs = reference(torch.tensor([sequence])).logits[0]
        mine = ours[str(index)]
        difference = (mine - theirs[-len(mine) :]).abs().max()
        assert difference < 1e-4, f"sequence {index} of {len(sequence)} tokens"


@pytest.mark.parametrize("budget", [5, 64, 1024])
def test_greedy_tokens(
    tiny_model: LlamaModel, tiny_reference: transformers.LlamaForCausalLM, budget: int
) -> None:
    core = make_core(tiny_model, max_num_batched_tokens=budget, num_blocks=200)
    sequences = prompts(10, 50, seed=1)
    for index, prompt in enumerate(sequences):
        core.add_request(wire_request(str(index), prompt, max_tokens=30))
    results = run_to_the_end(core)
    for index, prompt in enumerate(sequences):
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
def test_half_precision_stays_near(tiny_dir: Path, dtype: torch.dtype) -> None:
    from trioleg.engine.model_config import read_model_config
    from trioleg.engine.weights import load_weights

    config = read_model_config(tiny_dir)
    weights = load_weights(tiny_dir, config, dtype=dtype, device=torch.device("cpu"))
    half = LlamaModel(config, weights, max_model_len=256)
    sequences = prompts(4, 40)
    got = all_logits(half, sequences, budget=16, block_size=16)
    right = all_logits(load_tiny_llama(tiny_dir), sequences, budget=16, block_size=16)
    for key, logits in right.items():
        assert got[key].dtype == torch.float32
        assert (got[key] - logits).norm() < 0.1 * logits.norm()
