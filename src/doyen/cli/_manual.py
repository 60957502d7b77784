"""The format of `--help`: description, options, exit codes, examples.

A command defines its manual as one text, which `manual` adds to its parser. The part before the
exit codes is printed before the options, the rest after them. Paragraphs are wrapped to the width
of the terminal; a block with an indented line is printed as it is.
"""

from __future__ import annotations

import argparse
import textwrap

__all__ = ["EXIT_CODES", "Manual", "manual"]

EXIT_CODES = "exit codes:\n"


class Manual(argparse.HelpFormatter):
    """Wraps paragraphs, and prints lists and examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = text.strip("\n").split("\n\n")
        return "\n\n".join(
            block if "\n " in f"\n{block}" else textwrap.fill(" ".join(block.split()), width)
            for block in blocks
        )


def manual(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the manual to a parser."""
    before, codes, after = text.partition(EXIT_CODES)
    parser.formatter_class = Manual
    parser.description = f"{parser.description or ''}\n\n{before}".strip("\n")
    parser.epilog = (codes + after).strip("\n")
