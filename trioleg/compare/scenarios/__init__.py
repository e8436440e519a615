"""All scenarios. To import this package is to know them: ``scenario.SCENARIOS``.

A module of this folder is found by being here. Their order, by name, is that of the tables.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

for _module in sorted(iter_modules(__path__), key=lambda one: one.name):
    import_module(f"{__name__}.{_module.name}")
