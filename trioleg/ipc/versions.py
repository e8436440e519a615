"""What differs on the wire from one vLLM version to the next, and which versions are spoken.

Rules of this file: pure, like the codec beside it; a version is looked at once for each engine, never for a
message. The wire has no version of its own, but an engine's ready response names vLLM's.

Its plan: of all positions that a head reads, vLLM has moved those behind ``EngineCoreOutput``'s
``kv_transfer_params``, once; of those that it writes, those behind ``LoRARequest``'s ``base_model_name``, once.
What it appends needs no entry here, since trailing fields that are missing take their default and those that nobody
knows are ignored; so a newer version works until one of its fields moves.
"""

from __future__ import annotations

import logging
import re
from typing import Any, TypeAlias

import msgspec

from ..errors import EngineStartError
from ..lora import LoRARequest
from ..messages import EngineCoreOutput, EngineCoreOutputs

__all__ = [
    "NEWEST",
    "OLDEST",
    "check_version",
    "describe_version",
    "lora_array",
    "outputs_type",
    "shown",
]

logger = logging.getLogger(__name__)

Release: TypeAlias = tuple[int, int]

# Their frames are in the tests. vLLM before 0.23 says no version.
OLDEST: Release = (0, 23)
NEWEST: Release = (0, 33)

# Fields that were put in before others of EngineCoreOutput, and the release that did it.
_INSERTED: dict[str, Release] = {"ec_transfer_params": (0, 26)}

# The release that took ``tensorizer_config_dict``, a map or nil, out of LoRARequest's middle.
_WITHOUT_TENSORIZER: Release = (0, 32)

# A build from a checkout without tags calls itself 0.1.dev, however new it is.
_RELEASE = re.compile(r"(?!0\.1\.dev)(\d{1,4})\.(\d{1,4})")
# As much as is repeated of what the other side says, which may be anything.
_SHOWN_CHARS = 60


def _release(version: str) -> Release | None:
    """0.32 for "0.32.1+cpu"; None for a build that does not say which release it belongs to."""
    found = _RELEASE.match(version)
    return None if found is None else (int(found[1]), int(found[2]))


def _spell(release: Release) -> str:
    return "{}.{}".format(*release)


def shown(text: str) -> str:
    """The other side's words for a line of ours: ASCII without control characters, and few of them."""
    return ascii(text[:_SHOWN_CHARS])[1:-1][:_SHOWN_CHARS]


def _is_known(version: str) -> bool:
    release = _release(version)
    return release is not None and OLDEST <= release <= NEWEST


def describe_version(version: str) -> str:
    """The version in words, with a doubt where its wire is not known to us."""
    if _is_known(version):
        return f"vLLM {shown(version)}"
    return f"vLLM {shown(version)}, whose wire is not known here (known: {_spell(OLDEST)} to {_spell(NEWEST)})"


def check_version(version: str) -> None:
    """Whether an engine of this version can be spoken to; an unknown newer one can, with a warning.

    ``version`` is the ready response's ``vllm_version``. Raises ``EngineStartError`` for one before 0.23.
    """
    release = _release(version)
    if not version or (release is not None and release < OLDEST):
        said = f"vLLM {shown(version)}" if version else "a vLLM that does not say its version"
        raise EngineStartError(
            f"the engine is {said}, whose wire is too old; allowed: vLLM {_spell(OLDEST)} to "
            f"{_spell(NEWEST)}, and newer ones while what is read of them stays where it is"
        )
    if not _is_known(version):
        logger.warning(
            "the engine is %s: it is read like %s", describe_version(version), _spell(NEWEST)
        )


def outputs_type(version: str) -> type[EngineCoreOutputs]:
    """The struct to decode an engine's messages by: the same attributes, each where that version has it."""
    release = _release(version) or NEWEST
    late = [name for name, since in _INSERTED.items() if release < since]
    if not late:
        return EngineCoreOutputs
    # At the end they stand behind all that such an engine sends, and so keep their defaults.
    names = [name for name in EngineCoreOutput.__struct_fields__ if name not in late]
    output: Any = _define(EngineCoreOutput, [*names, *late], {})
    names = list(EngineCoreOutputs.__struct_fields__)
    outputs: type[EngineCoreOutputs] = _define(EngineCoreOutputs, names, {"outputs": list[output]})
    return outputs


def lora_array(request: LoRARequest, version: str) -> list[Any]:
    """The array by which an engine of this version knows an adapter, without what is as it would be anyway.

    A field in another one's place does not decode, which costs an engine its input.
    """
    array = [request.lora_name, request.lora_int_id, request.lora_path, request.base_model_name]
    switches = [request.load_inplace, request.is_3d_lora_weight]
    while switches and not switches[-1]:
        switches.pop()
    if switches and (_release(version) or NEWEST) < _WITHOUT_TENSORIZER:
        array.append(None)
    return [*array, *switches]


def _define(struct: type[msgspec.Struct], names: list[str], types: dict[str, Any]) -> Any:
    """A struct with the fields of another one in the order of ``names``, some with another type."""
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    definitions = [
        (name, types.get(name, fields[name].type), *_default(fields[name])) for name in names
    ]
    return msgspec.defstruct(struct.__name__, definitions, array_like=True)


def _default(field: msgspec.structs.FieldInfo) -> tuple[Any, ...]:
    if field.required:
        return ()
    if field.default_factory is not msgspec.NODEFAULT:
        return (msgspec.field(default_factory=field.default_factory),)
    return (field.default,)
