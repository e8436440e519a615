"""What fits on this machine: which device, how many cache blocks, how long a request may become.

Rules of this file: torch, no trio. Asked once, while the engine loads.
"""

from __future__ import annotations

import torch

from ..config import EngineConfig
from ..errors import InvalidRequestError
from .kv_cache import BLOCK_SIZE
from .model_config import ModelConfig

__all__ = ["DTYPES", "count_blocks", "find_device", "find_max_model_len"]

# The setting's names; None is the checkpoint's own.
DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# On CPU the cache shares the machine with everything else: at most half of what is free, and 2 GiB, which
# are 93,000 tokens of SmolLM2-135M in bfloat16. On a GPU it is what the memory is there for.
_CPU_SHARE, _CPU_BYTES = 0.5, 2 * 2**30
_GPU_SHARE = 0.85


def find_device(name: str) -> torch.device:
    """The device of a setting. Raises ``InvalidRequestError`` if PyTorch does not have it here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    allowed = "auto, cpu, or cuda where PyTorch has it"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise InvalidRequestError(f"device is {name!r}; allowed: {allowed}", parameter="device")
        # A device that is missing says so only when something is put on it.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequestError(
            f"device is {name!r}; allowed: {allowed} ({error})", parameter="device"
        ) from error
    return device


def count_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """The pool's size: what the settings say, or all that the engine's limits can use, bounded by memory;
    at least 0. Raises ``InvalidRequestError`` for a setting that does not fit into memory."""
    values = model.num_hidden_layers * BLOCK_SIZE * 2 * model.num_key_value_heads * model.head_dim
    affordable = _available_bytes(device) // (values * dtype.itemsize)
    asked = config.num_gpu_blocks_override
    if asked is not None:
        most = _available_bytes(device, whole=True) // (values * dtype.itemsize)
        if asked > most:
            raise InvalidRequestError(
                f"num_gpu_blocks_override is {asked}; allowed: at most {most}, by the memory that is free",
                parameter="num_gpu_blocks_override",
            )
        return asked
    longest = config.max_model_len or model.max_position_embeddings
    return min(config.max_num_seqs * -(-longest // BLOCK_SIZE), affordable)


def find_max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """The longest request, prompt and answer: it must fit into the model's context and into the cache.

    Raises ``InvalidRequestError`` for a setting beyond that; without one the longest is taken.
    """
    cache_tokens = num_blocks * BLOCK_SIZE
    longest = min(model.max_position_embeddings, cache_tokens)
    asked = config.max_model_len
    bounds = (
        f"the model's context is {model.max_position_embeddings} tokens, the key/value cache holds "
        f"{cache_tokens}"
    )
    if longest < 2:
        raise InvalidRequestError(
            f"no request fits, since it needs 2 tokens, one of them its answer's: {bounds}",
            parameter="max_model_len",
        )
    if asked is not None and not 2 <= asked <= longest:
        raise InvalidRequestError(
            f"max_model_len is {asked}; allowed: 2 to {longest} ({bounds})",
            parameter="max_model_len",
        )
    return asked or longest


def _available_bytes(device: torch.device, *, whole: bool = False) -> int:
    """What the cache may have: a share of what is free, or ``whole``."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return free if whole else int(free * _GPU_SHARE)
    if whole:
        return _free_memory()
    return min(_CPU_BYTES, int(_free_memory() * _CPU_SHARE))


def _free_memory() -> int:
    """Linux's own estimate of what can be had without swapping, in bytes."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _CPU_BYTES
