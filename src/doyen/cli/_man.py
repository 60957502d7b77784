"""The manual page of doyen, made from the parsers, so that it is always in step with them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import doyen
from doyen.cli import COMMANDS, parsers

__all__ = ["man_page"]


def man_page(command: str | None = None) -> str:
    """The page `doyen(1)`, or that of one command, for `man`."""
    top, commands = parsers(*([command] if command else COMMANDS))
    name = f"doyen-{command}" if command else "doyen"
    summary = COMMANDS[command] if command else "leader election for processes and hosts"
    lines = [
        f'.TH {name.upper()} 1 "" "doyen {doyen.__version__}" "User Commands"',
        ".SH NAME",
        f"{_text(name)} \\- {_text(summary)}",
    ]
    if command:
        parser = commands[command]
        lines += [".SH SYNOPSIS", *_usage(parser), ".SH DESCRIPTION", *_prose(parser.description)]
        lines += [".SH OPTIONS", *_arguments(parser), *_epilog(parser)]
        lines += [".SH SEE ALSO", _text("doyen(1)")]
    else:
        lines += [".SH SYNOPSIS", ".B doyen", ".I COMMAND", "[ARGUMENT ...]"]
        lines += [".SH DESCRIPTION", *_prose(top.description), ".SH COMMANDS"]
        for each, parser in commands.items():
            lines += [f".SS doyen {_text(each)}", *_prose(parser.description), ".PP"]
            lines += [*_usage(parser), *_arguments(parser)]
        lines += _epilog(top)
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Text in which nothing has a meaning for troff.

    >>> _text(".5 of --wait")
    '\\\\&.5 of \\\\-\\\\-wait'
    """
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    escaped = "".join(each if each.isascii() else f"\\[u{ord(each):04X}]" for each in escaped)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _usage(parser: argparse.ArgumentParser) -> Iterator[str]:
    usage = parser.format_usage().removeprefix("usage: ")
    yield f".B {_text(' '.join(usage.split()))}"


def _prose(text: str | None) -> Iterator[str]:
    """Paragraphs are filled; blocks with an indented line, such as lists, are left as they are."""
    for block in (text or "").strip("\n").split("\n\n"):
        if "\n " in f"\n{block}":
            yield from (".PP", ".nf", *map(_text, block.splitlines()), ".fi")
        else:
            yield from (".PP", *map(_text, block.splitlines()))


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from (".TP", f".B {_text(f'{parser.prog} {name}')}")
                yield from map(_text, (inner.description or "").splitlines()[:1] or [name])
                yield from (".RS", *_arguments(inner), ".RE")
        elif action.help is not argparse.SUPPRESS and "--help" not in action.option_strings:
            value = action.metavar or (None if action.nargs == 0 else action.dest.upper())
            flags = ", ".join(action.option_strings)
            shown = " ".join(filter(None, [flags, str(value) if value else None]))
            text = " ".join(((action.help or "") % {"default": action.default}).split())
            yield from (".TP", f".B {_text(shown)}", _text(text))


def _epilog(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Sections such as `exit codes:`, with lines as they are."""
    for block in (parser.epilog or "").split("\n\n"):
        title, _, rest = block.partition(":\n")
        if rest and "\n" not in title:
            yield f".SH {_text(title.upper().replace('EXIT CODES', 'EXIT STATUS'))}"
            yield from (
                ".nf",
                *(_text(line.removeprefix("  ")) for line in rest.splitlines()),
                ".fi",
            )
        else:
            yield from _prose(block)
