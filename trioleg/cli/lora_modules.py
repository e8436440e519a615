"""``--lora-modules``, as vLLM has it: several values behind one option.

trioleg serve MODEL --lora-modules sql=/adapters/sql '{"name": "chat", "path": "/adapters/chat"}'
"""

from __future__ import annotations

import click

from ..errors import InvalidRequestError
from ..lora import LoRAModulePath, read_lora_module

__all__ = ["LoRAModulesCommand", "lora_modules_option"]

_OPTION = "--lora-modules"


class LoRAModulesCommand(click.Command):
    """click's options have one value each; what follows the first is given the option's name here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, _spelled_out(args))
        except click.NoSuchOption as error:
            if "vllm" not in args:
                raise
            raise click.UsageError(
                f"{error.format_message()} Options of vLLM's own stand behind `--`.", ctx
            ) from None


def _spelled_out(args: list[str]) -> list[str]:
    """Each value behind a name of its own. A value has "=" in it, or is JSON; anything else ends the list."""
    spelled: list[str] = []
    is_listing = False
    for place, one in enumerate(args):
        if one == "--":
            return spelled + args[place:]
        is_value = not one.startswith("-") and ("=" in one or one.lstrip().startswith("{"))
        if is_listing and is_value and spelled[-1] != _OPTION:
            spelled.append(_OPTION)
        spelled.append(one)
        is_listing = one == _OPTION or (is_listing and is_value)
    return spelled


class _LoRAModule(click.ParamType[LoRAModulePath]):
    name = "NAME=PATH"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> LoRAModulePath:
        try:
            return read_lora_module(value)
        except InvalidRequestError as error:
            self.fail(str(error), param, ctx)


lora_modules_option = click.option(
    _OPTION,
    type=_LoRAModule(),
    multiple=True,
    metavar="NAME=PATH …",
    help="LoRA adapters to load, for an engine of vLLM's with --enable-lora: requests choose one as their model. "
    'Or as JSON: {"name": …, "path": …, "base_model_name": …}.',
)
