"""Writes the parts of docs/reference.md that can be read off the code.

    python tests/reference.py

They stand between `<!-- from the code: name -->` and `<!-- end -->`; a test compares them with what
is made here. Signatures and explanations are taken from the sources, so they read as they are
written, whatever the version of Python.
"""

from __future__ import annotations

import argparse
import ast
import logging
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from doyen import errors, events
from doyen.cli import COMMANDS, MANUAL, parsers
from doyen.election.options import CampaignSettings
from doyen.manage.shards.spec import ShardSpec
from doyen.stores.port import _BUILT_IN

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs/reference.md"
WIDTH = 100

_PART = re.compile(r"(<!-- from the code: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def rewritten(text: str) -> str:
    """The document with its parts made anew."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]().strip()}\n\n{part[3]}", text)


def module(name: str) -> ast.Module:
    """The source of a module of doyen."""
    path = ROOT / "src" / name.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text())


def definition(where: str, name: str) -> ast.ClassDef | Function:
    """A function or class of a module."""
    (found,) = [
        node
        for node in module(where).body
        if isinstance(node, ast.ClassDef | Function) and node.name == name
    ]
    return found


def summary(node: ast.ClassDef | Function) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())


def signature(node: Function) -> str:
    """A definition without its body, as in a stub."""
    yields = any(isinstance(each, ast.Yield) for each in ast.walk(node))
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) and not yields else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = re.sub(r"(?<=[\w\]])=(?=\S)", " = ", ast.unparse(node.args))
    line = f"{kind} {node.name}({arguments}){returns}: ..."
    if len(line) <= WIDTH - 4:
        return line
    pieces = re.split(r", (?![^\[]*\])", arguments)
    lines = (f"    {each}," for each in pieces)
    return "\n".join([f"{kind} {node.name}(", *lines, f"){returns}: ..."])


def stub(where: str, name: str) -> str:
    """A public function or class as a stub, each explained in a comment."""
    node = definition(where, name)
    if not isinstance(node, ast.ClassDef):
        return signature(node)
    public = [*_public(node), *(each for base in _private_bases(where, node) for each in base)]
    between = "\n" if all(isinstance(each, ast.AnnAssign) for each in public) else "\n\n"
    members = between.join(_member(each) for each in public)
    return f"class {name}:\n{textwrap.indent(members, '    ')}"


def _private_bases(where: str, node: ast.ClassDef) -> Iterator[Iterator[Function | ast.AnnAssign]]:
    """What a class has from classes that users do not know."""
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        if name.startswith("_"):
            private = definition(where, name)
            assert isinstance(private, ast.ClassDef)
            yield (each for each in _public(private) if getattr(each, "name", "") != "__init__")


def _public(node: ast.ClassDef) -> Iterator[Function | ast.AnnAssign]:
    """What users of a class meet, which is not how a session or a term is made and ended."""
    made = ("Session", "Config", "Subscription", "ShardSet", "OwnedShards", "ShardTerm")
    hidden = {name: {"__init__"} for name in made}
    hidden["Term"] = {"__init__", "loss"}
    for each in node.body:
        if isinstance(each, Function):
            public = each.name == "__init__" or not each.name.startswith("_")
            if public and each.name not in hidden.get(node.name, ()):
                yield each
        elif isinstance(each, ast.AnnAssign):
            yield each


def _member(node: Function | ast.AnnAssign) -> str:
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node).replace("field(default_factory=dict)", "{}")
    comment = textwrap.indent(textwrap.fill(summary(node), WIDTH - 6), "# ")
    decorators = (f"@{ast.unparse(each)}" for each in node.decorator_list)
    return "\n".join(filter(None, [comment, *decorators, signature(node)]))


def stubs(*names: tuple[str, str]) -> str:
    body = "\n\n\n".join(stub(where, name) for where, name in names)
    return f"```pyi\n{body}\n```"


def explained(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Annotated attributes with their types and the strings that follow them."""
    for each, after in zip(node.body, node.body[1:], strict=False):
        match each, after:
            case (
                ast.AnnAssign(target=ast.Name(name), annotation=kind),
                ast.Expr(ast.Constant(str(text))),
            ):
                yield name, ast.unparse(kind), " ".join(text.split())


def table(*heads: str, rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def options() -> str:
    node = definition("doyen.election.options", "CampaignOptions")
    assert isinstance(node, ast.ClassDef)
    defaults = {each.name: each.default for each in fields(CampaignSettings)}
    own = {"name": "host and process id", "meta": "`{}`"}
    kinds = {
        ast.unparse(each.targets[0]): ast.unparse(each.value).removeprefix("Literal")
        for each in module("doyen.election.options").body
        if isinstance(each, ast.Assign) and ast.unparse(each.value).startswith("Literal")
    }

    def rows() -> Iterator[tuple[str, ...]]:
        for name, kind, text in explained(node):
            shown = kinds.get(kind, "").strip("[]").replace(", ", " | ") or kind
            yield f"`{name}`", f"`{shown}`", own.get(name, f"`{defaults[name]!r}`"), text

    return table("option", "type", "default", "meaning", rows=rows())


def keywords(where: str, *names: str) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for each in names:
            node = definition(where, each)
            assert isinstance(node, ast.ClassDef)
            for name, kind, text in explained(node):
                yield f"`{name}`", f"`{kind}`", text

    return table("option", "type", "meaning", rows=rows())


def spec() -> str:
    node = definition("doyen.manage.shards.spec", "ShardSpec")
    assert isinstance(node, ast.ClassDef)
    defaults = {each.name: each.default for each in fields(ShardSpec)}
    own = {"count": "required", "pins": "`{}`", "weights": "`{}`", "zones": "`{}`"}
    rows = (
        (f"`{name}`", f"`{kind}`", own.get(name, f"`{defaults[name]!r}`"), text)
        for name, kind, text in explained(node)
    )
    return table("field", "type", "default", "meaning", rows=rows)


def errors_tree() -> str:
    tree = (errors.__doc__ or "").split("\n\n")[1]
    return f"```text\n{textwrap.dedent(tree)}\n```"


def events_table() -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for name in events.__all__:
            kind = getattr(events, name)
            if (
                isinstance(kind, type)
                and issubclass(kind, events.Event)
                and hasattr(kind, "log_name")
            ):
                shown = ", ".join(f"`{each}`" for each in kind._specs)
                node = definition("doyen.events", name)
                level = logging.getLevelName(kind.level).lower()
                yield f"`{name}`", f"`{kind.log_name}`", level, shown, summary(node)

    return table("event", "in the log", "level", "fields", "meaning", rows=rows())


def stores() -> str:
    """What each adapter says of its URL, before it says how it works."""

    def part(where: str) -> str:
        paragraphs = (ast.get_docstring(module(where)) or "").split("\n\n")
        headline = " ".join(paragraphs[0].split())
        urls = paragraphs[1] if len(paragraphs) > 1 and paragraphs[1].startswith("    ") else ""
        block = f"\n\n```text\n{textwrap.dedent(urls)}\n```" if urls else ""
        schemes = (scheme for scheme in sorted(_BUILT_IN) if _BUILT_IN[scheme] == where)
        return f"### {', '.join(f'`{scheme}`' for scheme in schemes)}\n\n{headline}{block}"

    return "\n\n".join(map(part, dict.fromkeys(_BUILT_IN[name] for name in sorted(_BUILT_IN))))


def commands() -> str:
    return "\n\n".join(_command(name) for name in COMMANDS)


def _command(name: str) -> str:
    parser = parsers(name)[1][name]
    codes = textwrap.dedent((parser.epilog or "").partition("\n")[2].partition("\n\n")[0])
    page = f"### `doyen {name}`\n\n{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.\n\n"
    choices: Any = next((each.choices for each in parser._actions if each.dest == "action"), None)
    if choices is None:
        page += _arguments(f"doyen {name}", parser)
    else:
        page += "\n\n".join(
            f"{each.description}\n\n{_arguments(f'doyen {name} {action}', each)}"
            for action, each in choices.items()
        )
    return f"{page}\n\nExit codes:\n\n```text\n{codes}\n```"


def _arguments(command: str, parser: argparse.ArgumentParser) -> str:
    actions = [each for each in parser._actions if each.dest != "help"]
    actions.sort(key=lambda each: (bool(each.option_strings), each.dest == "json"))
    usage = " ".join([command, *filter(None, map(_usage, actions))])
    rows = ((f"`{_shown(each)}`", each.help or "") for each in actions)
    return f"```text\n{usage}\n```\n\n{table('argument', 'meaning', rows=rows)}"


def _usage(action: argparse.Action) -> str:
    if action.option_strings:
        return _shown(action) if action.required else ""
    shown = _shown(action)
    if action.nargs == "+":
        shown = f"-- {shown} …" if action.dest == "command" else f"{shown} …"
    return f"[{shown}]" if action.nargs == "?" else shown


def _shown(action: argparse.Action) -> str:
    value = action.metavar or action.dest.upper()
    if not action.option_strings:
        return str(value)
    return " ".join([action.option_strings[-1], *([] if action.nargs == 0 else [str(value)])])


def exit_codes() -> str:
    codes = MANUAL.partition("exit codes:\n")[2].partition("\n\n")[0]
    return f"```text\n{textwrap.dedent(codes)}\n```"


PARTS: dict[str, Callable[[], str]] = {
    "connect": lambda: stubs(
        ("doyen.session", "connect"),
        ("doyen.blocking", "connect_blocking"),
        ("doyen.blocking", "while_leader"),
    ),
    "session": lambda: stubs(("doyen.session", "Session")),
    "options": options,
    "sessions": lambda: keywords("doyen.session", "SessionOptions", "ConnectOptions"),
    "callbacks": lambda: keywords("doyen.election.callbacks", "CallbackOptions"),
    "term": lambda: stubs(("doyen.term", "Term")),
    "values": lambda: stubs(
        ("doyen.model", "Leader"), ("doyen.model", "Candidate"), ("doyen.model", "Line")
    ),
    "config": lambda: "\n\n".join(
        [
            stubs(
                ("doyen.manage.config_session", "Config"),
                ("doyen.manage.config_session", "Subscription"),
                ("doyen.manage.config", "ConfigDocument"),
                ("doyen.manage.config", "Missed"),
                ("doyen.manage.config", "Regressed"),
            ),
            "Keywords of `Session.config`:",
            keywords("doyen.manage.config_session", "ConfigOptions"),
            "Keywords of `set` and `rollback`:",
            keywords("doyen.manage.config_session", "WriteOptions"),
        ]
    ),
    "shards": lambda: stubs(
        ("doyen.manage.shards.scopes", "ShardSet"),
        ("doyen.manage.shards.scopes", "OwnedShards"),
        ("doyen.manage.shards.slots", "ShardTerm"),
        ("doyen.manage.shards.routing", "ShardMap"),
    ),
    "spec": spec,
    "errors": errors_tree,
    "events": events_table,
    "node": lambda: stubs(
        ("doyen.quorum.node", "Node"),
        ("doyen.quorum.node.state_machine", "StateMachine"),
        ("doyen.quorum.node", "NodeRole"),
        ("doyen.quorum.node.driver", "Status"),
    ),
    "fencing": lambda: stubs(
        ("doyen.fencing.sql", "SQLGuard"),
        ("doyen.fencing.files", "GuardedFile"),
        ("doyen.fencing.objects", "GuardedObject"),
        ("doyen.fencing.seen", "SeenTokens"),
    ),
    "starlette": lambda: stubs(("doyen.integrations.starlette", "Leadership")),
    "frameworks": lambda: stubs(
        ("doyen.integrations.background", "BackgroundLeadership"),
        ("doyen.integrations.flask", "FlaskLeadership"),
        ("doyen.integrations.django.leadership", "DjangoLeadership"),
        ("doyen.integrations.apscheduler", "SchedulerLeadership"),
        ("doyen.integrations.rq", "LeaderCronScheduler"),
        ("doyen.integrations.click", "lead"),
        ("doyen.integrations.programs", "lead"),
        ("doyen.integrations.programs", "current_term"),
    ),
    "stores": stores,
    "commands": commands,
    "codes": exit_codes,
}


if __name__ == "__main__":
    REFERENCE.write_text(rewritten(REFERENCE.read_text()))
