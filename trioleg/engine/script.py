"""A script for the scripted engine: what it may say, and how it is read.

Rules of this file: plain data. A script is a JSON object; every field is optional but for one of
``token_ids`` and ``steps``, and a field that is not known is refused by its name:

    {"token_ids": [1, 2, 3], "step_interval_s": 0.01, "faults": [{"after_steps": 100, "how": "exit"}]}
"""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import InvalidRequestError

__all__ = ["Fault", "FaultKind", "Script", "load_script"]

FaultKind = Literal["raise", "exit", "sigkill", "hang", "bad_token_id", "error"]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong, at the step behind ``after_steps`` steps (of those that make tokens).

    "raise": the step raises. "exit": the process leaves at once, with status 3. "sigkill": it is
    killed. "hang": the step never returns. "bad_token_id": request number ``request`` (in the order
    of arrival, from 0) gets ``token_id`` as its next token, and nothing else happens. "error": the engine
    reports an error for that request, which ends it alone.
    """

    after_steps: int
    how: FaultKind
    request: int = 0
    token_id: int = -1


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine plays for every request alike. Durations are seconds.

    ``token_ids`` are given ``tokens_per_step`` at a time, again and again, until a request's own end (max_tokens,
    stop ids, the context). ``steps`` are the exact ids of each step; behind the last one the request ends with
    ``finish``: "stop" makes the last token a stop token, whose text is hidden; "length" does not.
    ``first_token_delay_s`` runs from a request's admission; ``prefill_chunks`` are steps without tokens before its
    first. ``step_interval_s`` is between two steps, 0: as fast as it can; ``delays_s`` are for a request's own
    steps, by how many it has had: {3: 2.0} is a silence of 2 s, or more, behind the third. ``num_gpu_blocks`` None
    is enough for ``max_num_seqs`` requests of full length. ``load_s`` is how long the start takes, and
    ``load_error`` the error that ends it.

    Logprobs are made up, as ``scripted_logprobs.py`` says: the token of rank r has −r, a token's own
    rank is 1 + its id modulo 3, the others' ids are the next ones below it, then those above it. A
    token in ``odd_logprobs`` has the logprob given there instead, wherever it stands.

    ``pooling`` is the vector that answers every request with pooling_params (those of task "embed",
    the first ``dimensions`` of it); without it these are refused. ``takes_constraints``: requests for structured
    outputs are served, too; that the tokens fit is then up to whoever writes the script.

    ``loras`` are LoRA adapters by their paths: the ``token_ids`` of requests that use them; one without any has too
    high a rank. Without ``loras`` the engine has no LoRA. It keeps the ``max_loras`` that were used last.
    """

    token_ids: list[int] = []
    steps: list[list[int]] = []
    tokens_per_step: int = 1
    step_interval_s: float = 0.0
    first_token_delay_s: float = 0.0
    delays_s: dict[int, float] = {}
    prefill_chunks: int = 0
    finish: Literal["length", "stop"] = "stop"
    max_num_seqs: int = 64
    max_model_len: int = 2048
    block_size: int = 16
    num_gpu_blocks: int | None = None
    load_s: float = 0.0
    load_error: str | None = None
    faults: list[Fault] = []
    odd_logprobs: dict[int, Literal["nan", "-inf", "inf"]] = {}
    pooling: list[float] = []
    takes_constraints: bool = False
    loras: dict[str, list[int]] = {}
    max_loras: int = 1

    def __post_init__(self) -> None:
        if bool(self.token_ids) == bool(self.steps):
            raise ValueError("one of token_ids and steps is needed, and not both")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; allowed: at least {least}")

        for place, delay in self.delays_s.items():
            if not delay >= 0:
                raise ValueError(f"delays_s[{place}] is {delay}; allowed: at least 0")

    @property
    def blocks(self) -> int:
        """The blocks that there are."""
        if self.num_gpu_blocks is not None:
            return self.num_gpu_blocks
        return self.max_num_seqs * self.blocks_for(self.max_model_len)

    def blocks_for(self, tokens: int) -> int:
        """The blocks that ``tokens`` tokens take."""
        return ceil(tokens / self.block_size)


_LEAST = {
    "tokens_per_step": 1,
    "step_interval_s": 0.0,
    "first_token_delay_s": 0.0,
    "prefill_chunks": 0,
    "max_num_seqs": 1,
    "max_model_len": 2,
    "block_size": 1,
    "num_gpu_blocks": 1,
    "load_s": 0.0,
    "max_loras": 1,
}


def load_script(path: str | os.PathLike[str]) -> Script:
    """The script in a JSON file. Raises ``InvalidRequestError`` with the file and what is wrong."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Script)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(
            f"script {os.fspath(path)}: {error}", parameter="script"
        ) from error
