"""What the engine's tests share: tiny random models, wire requests, and running a core to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from trioleg.config import EngineConfig
from trioleg.engine.core import EngineCore
from trioleg.engine.model import CausalLM
from trioleg.engine.model_config import read_model_config
from trioleg.engine.weights import load_weights
from trioleg.messages import EngineCoreOutput, EngineCoreRequest, EngineSamplingParams, FinishReason

VOCAB = 96


def save_tiny_llama(path: Path, **changes: Any) -> transformers.LlamaForCausalLM:
    """A random Llama, saved as Hugging Face saves it; returns the reference implementation."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**{**sizes, **changes})
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(path)
    return model


def load_tiny_llama(path: Path, *, max_model_len: int | None = None) -> CausalLM:
    config = read_model_config(path)
    weights = load_weights(path, config, dtype=torch.float32, device=torch.device("cpu"))
    return CausalLM(config, weights, max_model_len=max_model_len or config.max_position_embeddings)


def make_core(
    model: CausalLM,
    *,
    num_blocks: int = 64,
    engine_index: int = 0,
    model_dir: Path | None = None,
    **changes: Any,
) -> EngineCore:
    config = EngineConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **changes})
    return EngineCore(
        model, num_blocks=num_blocks, config=config, engine_index=engine_index, model_dir=model_dir
    )


def wire_request(
    request_id: str, prompt: list[int] | None, *, client_index: int = 0, **params: Any
) -> EngineCoreRequest:
    """A greedy request of 8 tokens, unless ``params`` say otherwise."""
    sampling = EngineSamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})
    return EngineCoreRequest(
        request_id, prompt, None, sampling, None, 0.0, None, None, None, client_index=client_index
    )


@dataclass
class Result:
    """What came for one request in all steps."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    outputs: list[EngineCoreOutput] = field(default_factory=list)


def run_to_the_end(
    core: EngineCore, *, after_step: Callable[[], None] | None = None, max_steps: int = 5000
) -> dict[str, Result]:
    """Steps until nothing is left; fails if that takes too many steps."""
    results: dict[str, Result] = {}
    for _ in range(max_steps):
        if core.wait_s() is None:
            return results
        for message in core.step().values():
            for output in message.outputs:
                result = results.setdefault(output.request_id, Result())
                assert result.finish_reason is None, f"{output} came after the end"
                result.token_ids += output.new_token_ids
                result.finish_reason = output.finish_reason
                result.stop_reason = output.stop_reason
                result.outputs.append(output)
        if after_step is not None:
            after_step()
    raise AssertionError(f"still not at rest after {max_steps} steps")


def only(messages: dict[int, Any]) -> Any:
    """The one message of a step."""
    (message,) = messages.values()
    return message
