"""``poseidon completion``: the lines with which a shell completes commands and options."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "shell",
        choices=SHELLS,
        help="for which shell; bash reads ~/.local/share/bash-completion/completions/poseidon, fish "
        "~/.config/fish/completions/poseidon.fish, and zsh what ~/.zshrc sources",
    )


def run(args: argparse.Namespace) -> int:
    """Print the lines."""
    print(write_completion(args.shell, options_of_commands()), end="")
    return 0


def options_of_commands(names: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return the options of these commands, or of all; those that cannot be imported here come without."""
    from poseidon.cli.main import COMMANDS

    found: dict[str, list[str]] = {}
    for name in sorted(COMMANDS) if names is None else names:
        module, _ = COMMANDS[name]
        parser = argparse.ArgumentParser(prog=name)
        try:
            importlib.import_module(module).add_arguments(parser)
        except Exception:  # an extra that is not installed
            found[name] = []
            continue
        found[name] = sorted(
            word for action in parser._actions for word in action.option_strings if word.startswith("--")
        )
    return found


def write_completion(shell: str, options: dict[str, list[str]]) -> str:
    """Return the lines for one shell. Pure."""
    names = " ".join(options)
    if shell == "fish":
        lines = [f"complete -c poseidon -n __fish_use_subcommand -a '{names}'"]
        for name, words in options.items():
            lines += [f"complete -c poseidon -n '__fish_seen_subcommand_from {name}' -l {word[2:]}" for word in words]
        return "\n".join(lines) + "\n"
    cases = "\n".join(f"    {name}) words='{' '.join(words)}' ;;" for name, words in options.items())
    lines = [
        "_poseidon() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" words=""',
        "  COMPREPLY=()",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f"    words='{names}'",
        '  elif [ "${current#-}" != "$current" ]; then',
        '    case "${COMP_WORDS[1]}" in',
        cases,
        "    esac",
        "  fi",
        '  [ -n "$words" ] && COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        # Where nothing of ours fits, files do.
        "complete -o bashdefault -o default -F _poseidon poseidon",
    ]
    start = ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    return "\n".join([*start, *lines]) + "\n"
