"""What `--help` shows: a paragraph or two, the options, exit codes, examples.

A command writes its manual as one text and gives it to its parser with `manual`. What stands before
the exit codes comes before the options, the rest after them. Prose is filled to the width of the
terminal; a block that has an indented line stays as it is written.
"""

from __future__ import annotations

import argparse
import textwrap

__all__ = ["EXIT_CODES", "Manual", "manual"]

EXIT_CODES = "exit codes:\n"


class Manual(argparse.HelpFormatter):
    """Fills paragraphs, and leaves lists and examples alone."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = text.strip("\n").split("\n\n")
        return "\n\n".join(
            block if "\n " in f"\n{block}" else textwrap.fill(" ".join(block.split()), width)
            for block in blocks
        )


def manual(parser: argparse.ArgumentParser, text: str) -> None:
    """Give a parser its manual."""
    before, codes, after = text.partition(EXIT_CODES)
    parser.formatter_class = Manual
    parser.description = f"{parser.description or ''}\n\n{before}".strip("\n")
    parser.epilog = (codes + after).strip("\n")
