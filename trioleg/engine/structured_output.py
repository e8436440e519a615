"""Structured outputs: grammars that are compiled beside the steps, and masks over the logits.

Rules of this file: llguidance, numpy and torch, no trio. The plan:

- ``GrammarCompiler`` holds a request back until its grammar is compiled, in a small pool of threads: most
  take under a millisecond, a hostile one seconds, and the others' steps go on meanwhile (llguidance releases the
  interpreter's lock). The first mask is made there, too, since a lexer is built when it is first needed.
- ``Grammar`` (``grammar.py``) is what such a request carries: it takes each sampled token, and says which one
  ends the answer.
- ``apply_grammars`` rules out what the grammars of a batch do not allow, before logprobs and sampling.

What goes wrong with a grammar while it runs, or takes too long, ends its own request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch
from llguidance import LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvalidRequestError
from ..grammar_gate import GrammarGate
from ..ll_tokenizer import read_ll_tokenizer
from ..structured_outputs import StructuredOutputsParams
from .grammar import Grammar
from .request import Request

__all__ = ["GrammarCompiler", "apply_grammars"]


class GrammarCompiler:
    """The requests whose grammars are being compiled. For the core's thread; ``close`` ends its own threads.

    ``model_dir`` has the tokenizer, which is read when the first request needs it: 0.3 s for 49,152 tokens, 1.7 s for
    152,000, in which no other thread of the process runs. None, or one that cannot be read, is an error of each
    request that asks.
    """

    def __init__(self, model_dir: Path | None, vocab_size: int) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._one_at_a_time = threading.Lock()
        # What has to be tried first may be hostile; what has passed before does not wait for it.
        self._unknown = ThreadPoolExecutor(1, thread_name_prefix="grammar trials")
        self._known = ThreadPoolExecutor(1, thread_name_prefix="known grammars")
        self._gate = GrammarGate(model_dir, vocab_size)
        self._futures: dict[str, Future[Grammar]] = {}
        self.requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Begins to compile; its id must not be live. Raises ``InvalidRequestError``."""
        params = StructuredOutputsParams.from_engine(request.params.structured_outputs)
        self.requests[request.request_id] = request
        pool = self._known if self._gate.has_passed(params) else self._unknown
        self._futures[request.request_id] = pool.submit(self._compile, params)

    def remove(self, request_ids: Iterable[str]) -> bool:
        """Forgets requests; True if there were any. What a thread is compiling it finishes in vain."""
        removed = [one for one in request_ids if self.requests.pop(one, None) is not None]
        for request_id in removed:
            self._futures.pop(request_id).cancel()
        return bool(removed)

    def take_done(self, *, wait_s: float = 0.0) -> list[tuple[Request, BaseException | None]]:
        """The requests that need not wait any more, in the order of their coming, each with what went wrong, or
        None: then it has its grammar. If there are none, waits for one, ``wait_s`` seconds at most."""
        if wait_s and self._futures:
            wait(self._futures.values(), timeout=wait_s, return_when=FIRST_COMPLETED)
        done = [request_id for request_id, future in self._futures.items() if future.done()]
        return [self._take(request_id) for request_id in done]

    def close(self) -> None:
        """Nothing is begun any more, and nobody waits for what is being compiled."""
        self._gate.close()
        for pool in (self._unknown, self._known):
            pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, request_id: str) -> tuple[Request, BaseException | None]:
        request, future = self.requests.pop(request_id), self._futures.pop(request_id)
        error = future.exception()
        if error is None:
            request.grammar = future.result()
        return request, error

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        if self._model_dir is None:
            raise InvalidRequestError(
                "structured_outputs needs the model's tokenizer, and this engine has none",
                parameter="structured_outputs",
            )
        with self._one_at_a_time:
            if self._tokenizer is None:
                self._tokenizer = read_ll_tokenizer(self._model_dir, self._vocab_size)
        self._gate.check(params)
        return Grammar(params, self._tokenizer)


@torch.inference_mode()
def apply_grammars(logits: Tensor, requests: Sequence[Request]) -> None:
    """Sets what a row's grammar does not allow to -inf; rows without one cost nothing.

    ``logits``: [rows, vocab], changed in place. A grammar that fails over its mask masks nothing: taking the row's
    token then says why. One mask after the other, so that each request's time is known; spread over two
    cores they were not faster.
    """
    for row, request in enumerate(requests):
        grammar = request.grammar
        if grammar is None:
            continue
        forbidden = _forbidden(grammar, logits.shape[1])
        if grammar.error is None:
            ends = request.masked_token_ids if request.is_short else []
            grammar.forces_end = bool(ends) and _all_true_but(forbidden, ends)
            logits[row].masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)


def _forbidden(grammar: Grammar, vocab_size: int) -> NDArray[np.bool_]:
    mask = np.zeros(grammar.num_words, dtype=np.int32)
    grammar.fill(mask)
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size)
    return np.logical_not(allowed)


def _all_true_but(forbidden: NDArray[np.bool_], ids: Sequence[int]) -> bool:
    rest = forbidden.copy()
    rest[list(ids)] = True
    return bool(rest.all())
