"""A model in GGUF files, rewritten as a Hugging Face directory.

Rules of this package: synchronous; needs the ``engine`` extra (gguf, numpy), so only ``model_store``
imports it, and only when there is something to convert. No torch.

The plan: three sections of the GGUF become three kinds of file. The tensors are dequantized and renamed
(``tensors``: model.safetensors); the architecture's settings become config.json (``config``); the
``tokenizer.*`` settings become tokenizer.json, tokenizer_config.json and generation_config.json
(``tokenizer``). What is read, and from how many files, is ``reader``'s. A setting or tensor that is not
translated is refused by name: a model that loads but answers a little wrong is worse than one that does
not load.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import make_config
from .reader import open_gguf
from .tensors import write_tensors
from .tokenizer import make_tokenizer, token_ids, tokenizer_config

__all__ = ["convert"]


def convert(sources: Sequence[Path], directory: Path, report: Callable[[int, int], None]) -> None:
    """Writes the model in ``sources`` into the existing, empty ``directory``.

    ``sources`` is the file, or all that a model is split into, in order. ``report(done, total)``
    counts bytes of tensors as the GGUF stores them. Raises ``ModelStoreError`` for a file that is no
    whole GGUF (any more) or that holds what is not translated, ``OSError`` of writing as it comes.
    """
    with open_gguf(sources) as model:
        config, permuted = make_config(model)
        tokenizer = make_tokenizer(model)
        ids = token_ids(model)
        of_tokenizer = tokenizer_config(model, config["max_position_embeddings"])
        model.refuse_the_rest()
        _write_json(directory / "config.json", config | ids)
        _write_json(directory / "generation_config.json", ids)
        tokenizer.save(str(directory / "tokenizer.json"))
        _write_json(directory / "tokenizer_config.json", of_tokenizer)
        write_tensors(directory / "model.safetensors", model, permuted, report)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
