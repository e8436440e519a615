"""What a server under test says of itself at ``/metrics``."""

from __future__ import annotations

import math
from collections.abc import Iterable

import h11
from prometheus_client.parser import text_string_to_metric_families

from ..errors import TriolegError
from .client import ask

__all__ = ["read_metrics"]


async def read_metrics(port: int, names: Iterable[str]) -> dict[str, float]:
    """The figures with these names, each summed over its labels; NaN for what is not there, which is no 0.

    Raises ``TriolegError`` if nobody answers.
    """
    try:
        async with ask(port, "/metrics") as exchange:
            await exchange.receive_all()
    except (OSError, h11.RemoteProtocolError) as error:
        raise TriolegError(f"the server under test does not answer any more: {error}") from error
    figures = dict.fromkeys(names, math.nan)
    for family in text_string_to_metric_families(exchange.body.decode()):
        for sample in family.samples:
            if sample.name in figures:
                before = figures[sample.name]
                figures[sample.name] = sample.value + (0 if math.isnan(before) else before)
    return figures
