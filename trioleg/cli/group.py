"""The one group that all commands belong to."""

from __future__ import annotations

import click

__all__ = ["commands"]


@click.group()
@click.version_option(package_name="trioleg")
def commands() -> None:
    """An LLM server whose return leg, from sampled token to data: line, is a tree of Trio nurseries.

    \b
    Example:
      trioleg serve
    """
