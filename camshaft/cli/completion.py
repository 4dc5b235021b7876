"""`camshaft completion`: print a script that completes commands, config keys and their values in a shell.

camshaft completion bash > ~/.local/share/bash-completion/completions/camshaft
camshaft completion zsh > ~/.zfunc/_camshaft                   # a folder in $fpath
camshaft completion fish > ~/.config/fish/completions/camshaft.fish

The script contains all keys and values, so completion does not start Python.
"""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from camshaft.cli.usage import CONFIG_OPTIONS
from camshaft.config import PPOConfig
from camshaft.config.backends import ENGINES, ROLLOUTS
from camshaft.config.render import SCHEMAS
from camshaft.config.schema.algorithm import ESTIMATORS
from camshaft.config.schema.fields import is_path
from camshaft.config.short_names import RECIPES, REWARD, short_names
from camshaft.config.tree import leaf_fields
from camshaft.plugins import REWARDS, import_attribute

COMMAND_SCHEMAS = {
    **SCHEMAS,
    **dict.fromkeys(("check-data", "check-environment", "doctor", "plan"), PPOConfig),
}
"""Schemas of the commands that take `key=value`."""

NAMES = {
    "strategy": ENGINES,
    "rollout.name": ROLLOUTS,
    "algorithm.adv_estimator": dict.fromkeys([*(name for name in ESTIMATORS if name != "gae"), *RECIPES]),
    "custom_reward_function.name": REWARDS,
    "custom_reward_function.path": REWARDS,
}
"""Maps the last components of a key to the names that it accepts besides import paths."""

_USUAL_OPTIONS = ("--help", *re.findall(r"--[a-z-]+|-m\b", CONFIG_OPTIONS))


class Words(NamedTuple):
    """Words to complete."""

    commands: dict[str, list[str]]
    """For each command, its options and actions, and keys with a final `=`."""
    values: dict[str, list[str]]
    """Values of the keys with a known set of values."""
    paths: list[str]
    """Keys whose values are paths."""


def main(argv: Sequence[str]) -> int:
    """Print the script for a shell, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="camshaft completion",
        description="Print a script that completes commands, config keys, file names and values in a shell.",
        epilog="bash, in this shell only: source <(camshaft completion bash)",
    )
    parser.add_argument("shell", choices=SCRIPTS, help="shell of the script")
    shell = parser.parse_args(argv).shell
    sys.stdout.write(SCRIPTS[shell](collect_words()))
    return 0


def collect_words() -> Words:
    """Collect the words of all commands from their help texts and from the schemas."""
    from camshaft.cli import COMMANDS

    commands: dict[str, list[str]] = {}
    values: dict[str, list[str]] = {}
    paths: set[str] = set()
    for command in COMMANDS:
        schema = COMMAND_SCHEMAS.get(command.name)
        has_usual_options = schema is not None and command.name not in ("check-environment", "doctor", "plan")
        commands[command.name] = (
            list(_USUAL_OPTIONS) if has_usual_options else _words_in_help(command.name, command.target)
        )
        if schema is not None:
            fields, names = leaf_fields(schema), short_names(schema)
            commands[command.name] += [f"{key}=" for key in (*names, *fields)]
            for name, key in ({key: key for key in fields} | names).items():
                if words := _known_values(name, key, fields[key].annotation):
                    values[name] = words
                if is_path(fields[key]):
                    paths.add(name)
    commands["completion"] += SCRIPTS
    return Words(commands, values, sorted(paths))


def _known_values(name: str, key: str, annotation: Any) -> list[str]:
    """Return the values to suggest for a key or its short name: those in `NAMES`, and those of its type."""
    words = [word for end, known in NAMES.items() if f".{key}".endswith(f".{end}") for word in known]
    if key == "custom_reward_function.path" and name != REWARD:
        words = []
    return words + _values(annotation)


def _values(annotation: Any) -> list[str]:
    """Return the values of a type with few of them."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        words = [word for kind in kinds for word in _values(kind)]
        return [*words, "null"] if words and len(kinds) < len(get_args(annotation)) else words
    return []


def _words_in_help(name: str, target: str) -> list[str]:
    """Return the options and the actions in the help of a command."""
    if name == "completion":  # this command, whose parser needs the scripts
        return ["--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        import_attribute(target)(["--help"])
    actions = out.getvalue().partition("  ACTION\n")[2].partition("\n\n")[0]
    options = re.findall(r"^  (?:-\w, )?(--[a-z][a-z-]+)", out.getvalue(), re.MULTILINE)
    return [*re.findall(r"^    (\w+) ", actions, re.MULTILINE), *dict.fromkeys(options)]


# -- scripts --------------------------------------------------------------------------------------


def _bash(words: Words) -> str:
    lists = "\n".join(f"        {name}) words='{' '.join(known)}' ;;" for name, known in words.commands.items())
    return f"""# bash completion of camshaft
_camshaft() {{
    local line=${{COMP_LINE:0:COMP_POINT}} words='' values='' word rest found='' IFS=$' \\t\\n'
    local token=${{line##*[[:space:]]}}
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W '{" ".join(words.commands)} --help --version' -- "$token"))
        return
    fi
    if [[ $token == *=* ]]; then
        case ${{token%%=*}} in
{_cases(words.values, "            {keys}) values='{values}' ;;")}
        esac
        case ${{token%%=*}} in
            {"|".join(words.paths)})
                compopt -o filenames 2>/dev/null
                while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "${{token#*=}}") ;;
        esac
        COMPREPLY+=($(compgen -W "$values" -- "${{token#*=}}"))
        [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${{COMPREPLY[@]/#/${{token%%=*}}=}}")
        return
    fi
    case ${{COMP_WORDS[1]}} in
{lists}
    esac
    for word in $(compgen -W "$words" -- "$token"); do
        rest=${{word#"$token"}}
        [[ $rest == *.* ]] && word=$token${{rest%%.*}}.
        [[ " $found " == *" $word "* ]] || found+=" $word"
    done
    COMPREPLY=($found)
    [[ ${{#COMPREPLY[@]}} -eq 1 && $found != *[=.] ]] || compopt -o nospace 2>/dev/null
    [[ ${{#COMPREPLY[@]}} -gt 0 ]] || {{
        compopt -o filenames 2>/dev/null
        while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$token")
    }}
}}
complete -F _camshaft camshaft
"""


def _zsh(words: Words) -> str:
    lists = "\n".join(f"      {name}) candidates=({_quoted(known)}) ;;" for name, known in words.commands.items())
    return f"""#compdef camshaft
# zsh completion of camshaft
_camshaft() {{
  local -a candidates
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(words.commands)} --help --version
  elif [[ $PREFIX == *=* ]]; then
    local key=${{PREFIX%%=*}}
    compset -P 1 '*='
    case $key in
{_cases(words.values, "      {keys}) candidates=({values}) ;;")}
    esac
    (( $#candidates )) && compadd -a candidates
    case $key in
      {"|".join(words.paths)}) _files ;;
    esac
  else
    case $words[2] in
{lists}
    esac
    compadd -S '' -a candidates || _files
  fi
}}
if [[ $funcstack[1] == _camshaft ]]; then _camshaft "$@"; else compdef _camshaft camshaft; fi
"""


def _fish(words: Words) -> str:
    lines = ["# fish completion of camshaft"]
    lines.append(f"complete -c camshaft -n __fish_use_subcommand -f -a '{' '.join(words.commands)}'")
    for name, known in words.commands.items():
        tokens = []
        for word in known:
            key = word.removesuffix("=")
            tokens += [word, *(f"{word}{value}" for value in words.values.get(key, ()) if word.endswith("="))]
        lines.append(f"complete -c camshaft -n '__fish_seen_subcommand_from {name}' -a '{' '.join(tokens)}'")
    return "\n".join(lines) + "\n"


def _cases(values: dict[str, list[str]], line: str) -> str:
    """Return one branch of a `case` per set of values."""
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, words in values.items():
        keys.setdefault(tuple(words), []).append(key)
    return "\n".join(line.format(keys="|".join(names), values=" ".join(words)) for words, names in keys.items())


def _quoted(words: Iterable[str]) -> str:
    return " ".join(f"'{word}'" if word.endswith("=") else word for word in words)


SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
