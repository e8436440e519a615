"""``Adapters``: the LoRA adapters of an ``LLM``, which outlive its engines.

An engine of vLLM's reads an adapter from its path whenever it meets one that it does not have at the moment, and
dies if it cannot. So a request is sent only with an adapter that the engine of the moment has loaded for us, under
the very same name, id and path; where adapters displace each other (more of them than the engine has room for at
once), each request first lets it look again. For the same reason one that is unloaded leaves the engine only behind
the last request that uses it. Another engine gets all of them before it counts as ready.

An engine's prefix cache knows an adapter by name and path. Where other weights may stand behind the same two, the
cache is emptied.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import trio
from msgspec import structs

from ..errors import (
    EngineDeadError,
    EngineStartError,
    InvalidRequestError,
    LoRAAdapterNotFoundError,
    TriolegError,
    WireError,
)
from ..lora import LoRAModulePath, LoRARequest
from .endings import one_line
from .engine_link import EngineLink

__all__ = ["Adapters"]

_log = logging.getLogger("trioleg.lora")

# vLLM's words for a path under which there is nothing.
_NOTHING_THERE = "No adapter found for"


class Adapters:
    """``modules`` are loaded into the first engine. ``ready_link``: that of the engine of the moment, or raises.

    A name stands for one id at a time. Loads and unloads go one after the other.
    """

    def __init__(
        self, modules: Sequence[LoRAModulePath], ready_link: Callable[[], EngineLink]
    ) -> None:
        self._loaded = {i: one.request(i) for i, one in enumerate(modules, 1)}
        self._ready_link = ready_link
        self._is_first_start = True
        # How many requests have begun with each, by id, and not been left.
        self._users: Counter[int] = Counter()
        # Unloaded, and still used.
        self._leaving: dict[int, LoRARequest] = {}
        # Unloaded: a request that named one of them before is not to bring it back.
        self._unloaded: set[int] = set()
        # Ids that the engine of the moment has heard of; and those whose answer never came: it may have what it had
        # before, or what it was told last.
        self._told: set[int] = set()
        # What names stood for before they were replaced: a request that was on its way then gets the successor.
        self._replaced: set[LoRARequest] = set()
        self._doubtful: set[int] = set()
        # What the engine of the moment has read, and may have left in its prefix cache.
        self._seen: set[tuple[str, str]] = set()
        self._lock = trio.Lock()

    @property
    def by_name(self) -> Mapping[str, LoRARequest]:
        """Those that requests may use, oldest first."""
        return {one.lora_name: one for one in self._loaded.values()}

    # ------------------------------------------------------------------ loading

    async def load(
        self,
        name: str,
        path: str,
        *,
        load_inplace: bool = False,
        is_3d_lora_weight: bool = False,
    ) -> LoRARequest:
        """Load an adapter under an id of our choice. ``load_inplace``: ``name`` may be loaded already, and is
        replaced, for requests in progress as well.

        Raises ``InvalidRequestError``, with the engine's own words where it refuses, ``LoRAAdapterNotFoundError``,
        ``EngineUnavailableError`` and ``EngineDeadError``. Cancel-safe: what was there before is there still.
        """
        async with self._lock:
            known = self.by_name.get(name)
            if known is not None and not load_inplace:
                raise InvalidRequestError(
                    f"lora_name is {name!r}, which has already been loaded; allowed: another name, or "
                    "load_inplace true, which replaces it",
                    parameter="lora_name",
                )
            leaving = (one for one in self._leaving.values() if one.lora_name == name)
            earlier = known or next(leaving, None)
            number = self._free_id() if earlier is None else earlier.lora_int_id
            request = LoRARequest(name, number, path, is_3d_lora_weight=is_3d_lora_weight)
            return await self._load(request)

    def _free_id(self) -> int:
        taken = self._loaded.keys() | self._leaving.keys() | self._unloaded | self._told
        return next(number for number in itertools.count(1) if number not in taken)

    async def add(self, request: LoRARequest) -> bool:
        """Load an adapter under the caller's own id; nothing happens if it is there and ``load_inplace`` false.
        Raises as ``load``."""
        async with self._lock:
            self._check_identity(request)
            if request.load_inplace or not self._is_certain(request):
                await self._load(request)
        return True

    async def _load(self, request: LoRARequest) -> LoRARequest:
        number, link = request.lora_int_id, self._ready_link()
        # Else the engine would stay with what it has, or may have, under this id.
        is_taken = number in self._told
        self._told.add(number)
        was_certain = number not in self._doubtful
        self._doubtful.add(number)
        try:
            await self._tell(link, structs.replace(request, load_inplace=is_taken))
        except InvalidRequestError:
            # It reads the new weights before it lets go of the old.
            if was_certain:
                self._doubtful.discard(number)
            raise
        self._doubtful.discard(number)
        if link.cause_of_death is not None:
            # Its successor may be there already, without the adapter.
            raise EngineDeadError(link.cause_of_death)
        self._leaving.pop(number, None)
        self._unloaded.discard(number)
        plain = _plain(request)
        if number in self._loaded:
            self._replaced.add(self._loaded[number])
        self._replaced.discard(plain)
        self._loaded[number] = plain
        _log.info("adapter %r (id %d) is loaded: %s", plain.lora_name, number, plain.lora_path)
        await self._forget_cached(link, plain)
        return plain

    async def _forget_cached(self, link: EngineLink, request: LoRARequest) -> None:
        where = (request.lora_name, request.lora_path)
        if where in self._seen and not await link.reset_prefix_cache(reset_running_requests=True):
            name = request.lora_name
            _log.warning("adapter %r: the prefix cache still knows its earlier weights", name)
        self._seen.add(where)

    async def _tell(self, link: EngineLink, request: LoRARequest) -> None:
        await _refuse_without_lora(link)
        try:
            is_loaded = await link.add_lora(request)
        except WireError as error:
            kind = InvalidRequestError
            if _NOTHING_THERE in str(error):
                kind = LoRAAdapterNotFoundError
            raise kind(
                f"lora_path is {request.lora_path!r}, from which the adapter {request.lora_name!r} cannot be loaded: "
                f"{error}",
                parameter="lora_path",
            ) from error
        if not is_loaded:
            raise InvalidRequestError(
                f"the engine does not load the adapter {request.lora_name!r}, and does not say why",
                parameter="lora_path",
            )

    async def remove(self, lora_id: int) -> bool:
        """Unload an adapter: from now on no request can use it. Requests that do go on, and the engine hears of it
        behind the last of them. False: there is no such adapter. Raises as ``call_utility``."""
        async with self._lock:
            link = self._ready_link()
            request = self._loaded.pop(lora_id, None)
            if request is None:
                return False
            self._unloaded.add(lora_id)
            _log.info("adapter %r (id %d) is unloaded", request.lora_name, lora_id)
            if self._users[lora_id]:
                self._leaving[lora_id] = request
            else:
                await link.remove_lora(lora_id)
            return True

    async def unload(self, name: str) -> None:
        """``remove`` by name. Raises ``LoRAAdapterNotFoundError``."""
        request = self.by_name.get(name)
        if request is None or not await self.remove(request.lora_int_id):
            raise LoRAAdapterNotFoundError(
                f"lora_name is {name!r:.200}, which is not loaded; allowed: an adapter that GET /v1/models "
                "lists",
                parameter="lora_name",
            )

    async def restore(self, link: EngineLink) -> None:
        """Load all into an engine that has just started. Raises ``EngineStartError`` if it is the first, and one of
        them cannot be had; later, such a one is unloaded: the others are served on."""
        for one in (self._leaving, self._seen, self._told, self._doubtful):
            one.clear()
        for number, request in list(self._loaded.items()):
            try:
                await self._tell(link, request)
            except InvalidRequestError as error:
                if self._is_first_start:
                    raise EngineStartError(f"lora_modules: {error}") from error
                del self._loaded[number]
                self._unloaded.add(number)
                _log.error("%s", one_line(f"an adapter is gone with the last engine: {error}"))
            else:
                self._seen.add((request.lora_name, request.lora_path))
                self._told.add(number)
        self._is_first_start = False

    # ------------------------------------------------------------------ requests

    def hold(self, request: LoRARequest | None) -> None:
        """While a request is prepared and served, its adapter does not leave the engine: until ``release``."""
        if request is not None:
            self._users[request.lora_int_id] += 1

    def release(self, request: LoRARequest | None) -> None:
        """The other half of ``hold``: the engine has been told that the request is over."""
        if request is None:
            return
        number = request.lora_int_id
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        """Nobody waits for the answer. An engine that cannot be asked now forgets it when it needs room."""
        if self._leaving.pop(number, None) is not None:
            with suppress(TriolegError):
                self._ready_link().tell("remove_lora", number)

    async def make_sure(self, request: LoRARequest | None) -> None:
        """Let the engine load what a request is about to use, if it may not have it. Raises as ``load``."""
        if request is None:
            return
        request = self._successor(request)
        number = request.lora_int_id
        if number in self._unloaded:
            raise self._not_loaded(request)
        if not self._is_certain(request):
            await self.add(_plain(request))
        link = self._ready_link()
        if len(self._loaded) + len(self._leaving) > link.ready.max_loras:
            await self._tell(link, _plain(request))

    def current(self, request: LoRARequest) -> LoRARequest:
        """The adapter as it is to be sent at this moment. Raises ``InvalidRequestError``."""
        request = self._successor(request)
        if not self._has(request) and not self._is_leaving(request):
            raise self._not_loaded(request)
        return _plain(request)

    def _successor(self, request: LoRARequest) -> LoRARequest:
        if _plain(request) in self._replaced:
            return self._loaded.get(request.lora_int_id, request)
        return request

    def _has(self, request: LoRARequest) -> bool:
        return self._loaded.get(request.lora_int_id) == _plain(request)

    def _is_certain(self, request: LoRARequest) -> bool:
        return self._has(request) and request.lora_int_id not in self._doubtful

    def _is_leaving(self, request: LoRARequest) -> bool:
        return self._leaving.get(request.lora_int_id) == _plain(request)

    def _not_loaded(self, request: LoRARequest) -> LoRAAdapterNotFoundError:
        names = ", ".join(map(repr, self.by_name)) or "none"
        return LoRAAdapterNotFoundError(
            f"lora_request is the adapter {request.lora_name!r} (id {request.lora_int_id}), which is not loaded any "
            f"more; allowed: those that are ({names}), or LLM.add_lora first",
            parameter="lora_request",
        )

    def _check_identity(self, request: LoRARequest) -> None:
        """The engine tells adapters apart by their ids, and requests by their adapters' names."""
        for number, other in (self._loaded | self._leaving).items():
            is_same_id = number == request.lora_int_id
            is_same_name = other.lora_name == request.lora_name
            may_differ = request.load_inplace or number in self._leaving
            if is_same_id and is_same_name and (may_differ or other == _plain(request)):
                continue
            if is_same_id or is_same_name:
                raise InvalidRequestError(
                    f"lora_int_id is {request.lora_int_id} for the adapter {request.lora_name!r} at "
                    f"{request.lora_path!r}; allowed: what is not taken by {other.lora_name!r} (id {number}) at "
                    f"{other.lora_path!r}, or load_inplace, which replaces it",
                    parameter="lora_int_id",
                )


def _plain(request: LoRARequest) -> LoRARequest:
    """As a request carries it: with load_inplace an engine would read the adapter anew for each step."""
    return structs.replace(request, load_inplace=False)


async def _refuse_without_lora(link: EngineLink) -> None:
    """Raises ``InvalidRequestError`` if the engine was started without LoRA. Versions before 0.29 do not say."""
    supports = link.ready.supports_lora
    words = ""
    if supports is None:
        try:
            await link.list_loras()
        except WireError as error:
            supports, words = False, f" ({error})"
    if supports is False:
        raise InvalidRequestError(
            f"this engine has no LoRA adapters{words}; allowed: none, unless it is one of vLLM's, started with "
            "--enable-lora",
            parameter="lora_request",
        )
