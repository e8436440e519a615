"""The tokenizer: the real model against recorded values, and small directories made wrong on purpose."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from trioleg.errors import InvalidRequestError, ModelStoreError
from trioleg.tokenizer import Tokenizer

_DATA = Path(__file__).parent / "data"


def _cases(file: str, key: str = "cases") -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((_DATA / file).read_text(encoding="utf-8"))[key]
    return cases


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_directory(smollm2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model with a vocabulary of bytes, metaspace and a few words, as Llama 2 has one."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[("▁", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    _write(tmp_path, "config.json", vocab_size=300, eos_token_id=2, max_position_embeddings=64)
    return tmp_path


def _write(directory: Path, file: str, **values: Any) -> None:
    (directory / file).write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("case", _cases("smollm2_tokens.json"), ids=lambda case: case["text"])
def test_recorded_tokens(real: Tokenizer, case: dict[str, Any]) -> None:
    assert real.encode(case["text"]) == case["ids"]
    assert real.decode(case["ids"]) == case["decoded_skip_special"]
    assert real.decode(case["ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.parametrize("case", _cases("smollm2_greedy.json"), ids=lambda case: case["user"])
def test_recorded_chat_prompts(real: Tokenizer, case: dict[str, Any]) -> None:
    prompt = real.apply_chat_template([{"role": "user", "content": case["user"]}])
    assert real.encode(prompt, add_special_tokens=False) == case["prompt_token_ids"]
    assert real.decode(case["greedy_token_ids"]) == case["text"]


@pytest.mark.parametrize("vector", _cases("detok_vectors.json", "vectors"), ids=lambda v: v["text"])
def test_recorded_multi_byte_characters(real: Tokenizer, vector: dict[str, Any]) -> None:
    assert real.decode(vector["ids"]) == vector["text"]


def test_what_the_default_model_says_of_itself(real: Tokenizer) -> None:
    assert real.vocab_size == 49152
    assert real.eos_token_id == real.backend.token_to_id("<|im_end|>") == 2
    assert real.other_eos_token_ids == ()
    assert real.max_model_len == 8192
    assert real.generation_defaults == {}
    # Its longest entry is a rule of minus signs.
    assert real.max_chars_per_token == 81


# The model's vocabulary has no entries for some control characters and for the first bytes of planes
# 4 and up: such text loses them, with any tokenizer of this model.
_COVERED = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cc", "Cs"])


@given(text=st.text(_COVERED))
def test_decoding_gives_the_text_back(real: Tokenizer, text: str) -> None:
    ids = real.encode(text)
    assert real.decode(ids, skip_special_tokens=False) == text
    assert len(text) <= len(ids) * real.max_chars_per_token


@pytest.mark.parametrize("text", ["aaaa", "a a a", "", "é🦊", "</s>" * 9, "<0x41>"])
def test_the_bound_on_characters_holds_for_metaspace(directory: Path, text: str) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    assert len(text) <= len(tokenizer.encode(text)) * tokenizer.max_chars_per_token


def test_added_tokens_count_for_the_bound(directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["<|a very long special token|>"])
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.max_chars_per_token == len("<|a very long special token|>")
    assert sorted(tokenizer.pieces.added_token_ids) == [0, 1, 2, 262]


@pytest.mark.parametrize("text", ["\ud800", "half \udc00 a pair"])
def test_a_lone_surrogate_is_refused(real: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate U\+D[8C]00") as caught:
        real.encode(text)
    assert caught.value.parameter == "prompt"
    with pytest.raises(InvalidRequestError, match="lone surrogate") as caught:
        real.apply_chat_template([{"role": "user", "content": text}])
    assert caught.value.parameter == "messages"


def test_encoding_in_a_thread_leaves_the_interpreter_to_others(real: Tokenizer) -> None:
    # About half a second of work. Holding the lock would make one pause of all of it.
    text = "It is what it is, said the fox; 1234567890 times. " * 20_000
    times: list[float] = []

    def encode() -> None:
        times.append(time.perf_counter())
        real.encode(text)
        times.append(time.perf_counter())

    thread = threading.Thread(target=encode)
    last, pause = time.perf_counter(), 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        last, pause = now, max(pause, now - last)
        thread.join(0.001)
    assert pause < (times[1] - times[0]) / 2


def test_a_model_without_a_template_takes_no_messages(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.parameter == "messages"


def test_the_end_tokens(directory: Path) -> None:
    def ends() -> tuple[int | None, tuple[int, ...]]:
        tokenizer = Tokenizer.from_directory(directory)
        return tokenizer.eos_token_id, tokenizer.other_eos_token_ids

    assert ends() == (2, ())
    _write(directory, "generation_config.json", eos_token_id=[259, 0, 2])
    assert ends() == (259, (0, 2))
    # The tokenizer's own end token comes first, whatever the list's order.
    _write(directory, "tokenizer_config.json", eos_token={"content": "</s>", "special": True})
    assert ends() == (2, (259, 0))
    _write(directory, "tokenizer_config.json", eos_token="<unk>")
    _write(directory, "generation_config.json", temperature=0.5)
    assert ends() == (0, (2,))


def test_a_model_without_an_end_token(directory: Path) -> None:
    _write(directory, "config.json", vocab_size=300)
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.eos_token_id, tokenizer.other_eos_token_ids) == (None, ())
    assert tokenizer.max_model_len is None


def test_settings_of_a_nested_language_model(directory: Path) -> None:
    nested = {"vocab_size": 400, "max_position_embeddings": 128}
    _write(directory, "config.json", eos_token_id=2, text_config=nested)
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.vocab_size, tokenizer.max_model_len) == (400, 128)
    assert tokenizer.eos_token_id == 2


def test_generation_defaults_are_those_present(directory: Path) -> None:
    _write(
        directory, "generation_config.json", temperature=0.6, top_p=None, top_k=20, pad_token_id=0
    )
    defaults = Tokenizer.from_directory(directory).generation_defaults
    assert defaults == {"temperature": 0.6, "top_k": 20}


def test_truncation_of_a_training_run_is_undone(directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    whole = backend.encode("a a a a a a a a").ids
    backend.enable_truncation(3)
    backend.enable_padding(length=16)
    backend.save(str(directory / "tokenizer.json"))
    assert Tokenizer.from_directory(directory).encode("a a a a a a a a") == whole


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(directory: Path, file: str) -> None:
    (directory / file).unlink()
    with pytest.raises(ModelStoreError, match=f"{file} is missing"):
        Tokenizer.from_directory(directory)


_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.mark.parametrize("file", _FILES)
@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"a":' * 100_000]
)
def test_a_corrupt_file_is_named(directory: Path, file: str, content: bytes) -> None:
    (directory / file).write_bytes(content)
    with pytest.raises(ModelStoreError, match=file):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    ("file", "values", "named"),
    [
        ("config.json", {}, "has no vocab_size"),
        ("config.json", {"vocab_size": "many"}, "vocab_size is 'many'"),
        ("config.json", {"vocab_size": True}, "vocab_size is True"),
        ("config.json", {"vocab_size": 9, "text_config": [1]}, "text_config"),
        ("config.json", {"vocab_size": 9, "max_position_embeddings": 0}, "embeddings is 0"),
        ("generation_config.json", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ("generation_config.json", {"eos_token_id": [1, -2]}, r"eos_token_id is \[1, -2\]"),
        ("generation_config.json", {"temperature": "hot"}, "temperature is 'hot'"),
        ("config.json", {"vocab_size": 2**31}, "vocab_size is 2147483648; .* from 1 to 2147483647"),
        ("config.json", {"vocab_size": 9, "max_position_embeddings": 10**30}, "embeddings is 1000"),
        ("generation_config.json", {"eos_token_id": 10**30}, "eos_token_id is 1000"),
        ("generation_config.json", {"temperature": float("inf")}, "temperature is inf"),
        ("generation_config.json", {"top_p": float("nan")}, "top_p is nan"),
        ("generation_config.json", {"top_k": 10**400}, "top_k is 1000.*…; allowed: a number"),
        ("tokenizer_config.json", {"chat_template": 7}, "chat_template"),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}, "does not parse: line 1"),
    ],
)
def test_a_value_that_cannot_be_is_named(
    directory: Path, file: str, values: dict[str, Any], named: str
) -> None:
    _write(directory, file, **values)
    with pytest.raises(ModelStoreError, match=named) as caught:
        Tokenizer.from_directory(directory)
    assert file in str(caught.value)
