"""`doyen completion SHELL`: print a completion script, made from the parsers themselves.

The scripts are static: pressing Tab starts no process, and asks no store. What a command or an
option is called is in the script, names of elections are not.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from doyen.cli import COMMANDS, parsers
from doyen.cli._manual import manual
from doyen.cli._output import Exit, print_json

__all__ = ["MANUAL", "CompletionWord", "configure", "run", "words"]

MANUAL = """\
Prints a script that completes commands, options and their values, for bash, zsh or fish. It is
made once and asks no store when used; make it again after an upgrade.

exit codes:
  0    done
  others as for every command: see doyen --help

examples:
  # bash: in ~/.bashrc
  eval "$(doyen completion bash)"
  # zsh: into a folder of $fpath, before compinit
  doyen completion zsh > ~/.zfunc/_doyen
  # fish
  doyen completion fish > ~/.config/fish/completions/doyen.fish
"""

_CONTINUED = " \\\n            "
_FILES = {"FILE", "LOG"}
_COMMANDS = {"CMD"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    manual(parser, MANUAL)
    parser.add_argument("shell", metavar="SHELL", choices=list(_SHELLS), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    script = _SHELLS[args.shell]()
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        print(script, end="")
    return Exit.DONE


@dataclass(frozen=True, slots=True)
class CompletionWord:
    """Something that a command takes: an option with its spellings, or a positional argument."""

    flags: tuple[str, ...]
    value: str | None
    """What an argument or the value of an option is called; None for an option without one."""
    choices: tuple[str, ...]
    many: bool
    help: str

    @property
    def files(self) -> bool:
        return self.value in _FILES

    @property
    def command(self) -> bool:
        return self.value in _COMMANDS


def words() -> dict[str, list[CompletionWord]]:
    """What each command takes; under the empty name, what `doyen` itself does."""
    top, commands = parsers(*COMMANDS)
    return {name: [*_words(parser)] for name, parser in [("", top), *commands.items()]}


def _words(parser: argparse.ArgumentParser) -> Iterator[CompletionWord]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        value = None if action.nargs == 0 else str(action.metavar or action.dest.upper())
        yield CompletionWord(
            flags=tuple(action.option_strings),
            value=value,
            choices=tuple(map(str, action.choices or ())),
            many=action.nargs in ("+", "*"),
            help=(action.help or "").partition(" (default")[0],
        )


def _options(taken: list[CompletionWord]) -> list[CompletionWord]:
    return [word for word in taken if word.flags]


def _positionals(taken: list[CompletionWord]) -> list[CompletionWord]:
    return [word for word in taken if not word.flags]


def _spellings(taken: list[CompletionWord]) -> list[str]:
    return [flag for word in _options(taken) for flag in word.flags]


def _bash() -> str:
    known = words()
    cases = []
    for name, taken in known.items():
        offered = [*_spellings(taken), *(COMMANDS if not name else ())]
        offered += [choice for word in _positionals(taken) for choice in word.choices]
        lines = [f"    {name or chr(39) * 2})"]
        valued = [word for word in _options(taken) if word.value]
        if valued:
            lines.append("        case $before in")
            for word in valued:
                act = "_doyen_files" if word.files else _bash_words(word.choices)
                lines.append(f"        {'|'.join(word.flags)}) {act}; return ;;")
            lines.append("        esac")
        if any(word.files for word in _positionals(taken)):
            lines.append("        [[ $word == -* ]] || { _doyen_files; return; }")
        lines += [f"        {_bash_words(offered)}", "        ;;"]
        cases.append("\n".join(lines))
    return _BASH.replace("@CASES@", "\n".join(cases)).replace(
        "@RUNS@", "|".join(name for name, taken in known.items() if _runs(taken))
    )


def _bash_words(offered: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    return f"_doyen_words '{' '.join(offered)}'"


def _runs(taken: list[CompletionWord]) -> bool:
    """Whether a command of the system follows `--`."""
    return any(word.command for word in taken)


_BASH = """\
# bash completion for doyen, made by `doyen completion bash`

_doyen_words() { COMPREPLY=($(compgen -W "$1" -- "$word")); }

_doyen_files() {
    local IFS=$'\\n'
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "$word"))
}

_doyen() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command='' i
    COMPREPLY=()
    # Bash takes `--option=value` for three words.
    [[ $word == = ]] && word=''
    [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ ${COMP_WORDS[i]} == -- ]]; then
            case $command in
            @RUNS@)
                ((i == COMP_CWORD - 1)) && COMPREPLY=($(compgen -c -- "$word")) || _doyen_files
                ;;
            *) _doyen_files ;;
            esac
            return
        fi
        [[ -z $command && ${COMP_WORDS[i]} != -* ]] && command=${COMP_WORDS[i]}
    done
    case $command in
@CASES@
    esac
}

complete -F _doyen doyen
"""


def _zsh() -> str:
    known = words()
    commands = "\n".join(
        f"        {_quoted(f'{name}:{summary}')}" for name, summary in COMMANDS.items()
    )
    cases = []
    for name, taken in known.items():
        if name:
            specs = ["_arguments -s -S", *_zsh_specs(taken)]
            cases.append(f"    {name})\n        {_CONTINUED.join(specs)}\n        ;;")
    top = " ".join(_zsh_specs(_options(known[""])))
    script = _ZSH.replace("@COMMANDS@", commands).replace("@CASES@", "\n".join(cases))
    return script.replace("@TOP@", top)


def _zsh_specs(taken: list[CompletionWord]) -> Iterator[str]:
    for word in _options(taken):
        value = f":{word.value}:{_zsh_action(word)}" if word.value else ""
        others = f"({' '.join(word.flags)})" if len(word.flags) > 1 else ""
        for flag in word.flags:
            yield _quoted(f"{others}{flag}[{_zsh_text(word.help)}]{value}")
    for position, word in enumerate(_positionals(taken), 1):
        if word.command:
            yield _quoted(f"{position}:command:_command_names -e")
            yield _quoted("*::arguments:_normal")
        else:
            where = "*" if word.many else position
            # An argument that nothing is known about must not stand in the way of options.
            action = _zsh_action(word) or f'_guard "^-*" {word.value}'
            yield _quoted(f"{where}:{word.value}:{action}")


def _zsh_action(word: CompletionWord) -> str:
    if word.choices:
        return f"({' '.join(word.choices)})"
    return "_files" if word.files else ""


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


_ZSH = """\
#compdef doyen
# zsh completion for doyen, made by `doyen completion zsh`

_doyen() {
    local -a commands
    commands=(
@COMMANDS@
    )
    if ((CURRENT == 2)); then
        _describe -t commands command commands
        _arguments @TOP@
        return
    fi
    shift words
    ((CURRENT--))
    case $words[1] in
@CASES@
    esac
}

if [[ $funcstack[1] == _doyen ]]; then
    _doyen "$@"
else
    compdef _doyen doyen
fi
"""


def _fish() -> str:
    lines = ["# fish completion for doyen, made by `doyen completion fish`", "complete -c doyen -f"]
    for name, taken in words().items():
        when = f"__fish_seen_subcommand_from {name}" if name else "__fish_use_subcommand"
        begin = f"complete -c doyen -n {_quoted(when)}"
        for word in taken:
            flags = [f"-l {flag[2:]}" for flag in word.flags if flag.startswith("--")]
            flags += [f"-s {flag[1:]}" for flag in word.flags if not flag.startswith("--")]
            if word.flags and word.value:
                flags.append("-r -F" if word.files else "-x")
            if not word.flags and word.files:
                flags.append("-F")
            if word.choices:
                flags.append(f"-a {_quoted(' '.join(word.choices))}")
            if word.command:
                after = f"{when}; and contains -- -- (commandline -opc)"
                lines.append(
                    f"complete -c doyen -n {_quoted(after)} -a '(__fish_complete_command)'"
                )
            if flags:
                text = f" -d {_quoted(word.help)}" if word.flags else ""
                lines.append(f"{begin} {' '.join(flags)}{text}")
    for name, summary in COMMANDS.items():
        lines.append(f"complete -c doyen -n __fish_use_subcommand -a {name} -d {_quoted(summary)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """In single quotes, as all three shells read them."""
    return "'" + text.replace("'", r"'\''") + "'"


_SHELLS: dict[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
