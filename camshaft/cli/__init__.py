"""The command line: `camshaft COMMAND ...`.

`COMMANDS` is the table of all commands. Each command is a function `(argv) -> exit status` in a module of this package.

Commands import torch only after they have parsed the arguments and validated the config, so `--help` and config errors
are fast. A `CamshaftError` or an error of the operating system, such as a full disk, is printed as a message on
stderr. The exit status is 2 for errors in the config or the arguments and 1 for all others. Any other exception is a
bug and is raised with its traceback.
"""

import argparse
import difflib
import errno
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import NamedTuple

from camshaft.errors import CamshaftError, ConfigError, report_bug, report_error, report_file_error
from camshaft.masking import mask_arguments
from camshaft.plugins import import_attribute
from camshaft.subprocesses import open_closed_streams
from camshaft.version import __version__

INTERRUPTED = 130
"""Exit status that shells use for a program that Ctrl-C ended."""
BROKEN_PIPE = 141
"""Exit status that shells use for a program that SIGPIPE ended."""

_OTHER_NAMES = {
    "ppo ...": ("train", "rl", "run", "start", "main_ppo"),
    "sft ...": ("finetune", "main_sft", "sft_trainer"),
    "rm ...": ("reward", "reward_model", "train_rm"),
    "generate ...": ("infer", "inference", "rollout", "sample", "predict", "main_generation"),
    "eval ...": ("evaluate", "score", "main_eval"),
    "view RUNS": ("dashboard", "board", "ui", "webui", "tensorboard"),
    "export CHECKPOINT": ("merge", "model_merger", "convert", "save"),
    "ppo -m lr=1e-6,3e-6 ...": ("tune", "sweep", "hpo"),
    "ppo with the same out=FOLDER, which resumes the run": ("resume", "continue"),
    "ppo devices=8 ..., which starts its processes": ("launch", "accelerate", "torchrun"),
    "check-data ...": ("preprocess", "prepare", "tokenize", "check"),
    "serve model=FOLDER": ("tinker", "server"),
    "doctor": ("info", "env", "version"),
}
"""Names that people type for a command, by what to write instead."""

_NO_THREAD = "can't start new thread"
"""Message of the RuntimeError that Python raises if the system has no resources for another thread."""


class Command(NamedTuple):
    """A command of the command line."""

    name: str
    help: str
    target: str
    """Import path `module:function`, which is imported when the command runs."""


COMMANDS = (
    Command("ppo", "train with PPO, GRPO and related algorithms", "camshaft.cli.ppo:main"),
    Command("sft", "supervised fine-tuning", "camshaft.cli.supervised:sft"),
    Command("rm", "train a reward model on preference pairs", "camshaft.cli.supervised:rm"),
    Command("generate", "generate responses to the prompts of a data file", "camshaft.cli.generate:main"),
    Command("eval", "score the responses of a data file", "camshaft.cli.evaluate:main"),
    Command("serve", "train and sample for programs that use the Tinker API", "camshaft.cli.serve:main"),
    Command("doctor", "check this machine, or what a run needs, before it starts", "camshaft.cli.doctor:main"),
    Command("plan", "forecast the memory of a run before it starts", "camshaft.cli.plan:main"),
    Command("check-data", "check the data and the reward function of a PPO run", "camshaft.cli.check_data:main"),
    Command("export", "export the model of a checkpoint as a Hugging Face folder", "camshaft.cli.export:main"),
    Command("checkpoints", "list the checkpoints of a run", "camshaft.cli.checkpoints:main"),
    Command("view", "show runs on a live page, in a file or in the terminal", "camshaft.cli.view:main"),
    Command("show", "print the responses of a training step", "camshaft.cli.runs:show"),
    Command("compare", "compare the config and the metrics of runs", "camshaft.cli.runs:compare"),
    Command("plot", "plot the metrics of runs", "camshaft.cli.runs:plot"),
    Command("config", "explain or list config keys", "camshaft.cli.config:main"),
    Command("metrics", "explain or list logged metrics", "camshaft.cli.explain:metrics"),
    Command("engines", "list training engines, and explain their features", "camshaft.cli.explain:engines"),
    Command("rollouts", "list rollouts", "camshaft.cli.explain:rollouts"),
    Command("check-engine", "check a training engine against the engine contract", "camshaft.cli.check:engine"),
    Command("check-rollout", "check a rollout backend against the rollout contract", "camshaft.cli.check:rollout"),
    Command("check-tinker", "check a server of the Tinker API against its contract", "camshaft.cli.check_tinker:main"),
    Command(
        "check-model", "compare a model with transformers, and name what differs", "camshaft.cli.parity:check_model"
    ),
    Command(
        "check-environment",
        "check an environment with scripted episodes, or play it by hand",
        "camshaft.cli.check_environment:main",
    ),
    Command("parity", "compare the log-probs of an engine and a rollout", "camshaft.cli.parity:main"),
    Command("completion", "print a script for the completion of keys in a shell", "camshaft.cli.completion:main"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process arguments) selects, and return the exit status."""
    sys.excepthook = report_bug
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale may lack characters of a response or a path
    targets = {command.name: command.target for command in COMMANDS}
    try:
        try:
            if "" not in sys.path and (folder := _working_directory()) not in sys.path:
                # This allows my_engine:MyEngine. The last entry cannot shadow an installed package.
                sys.path.append(folder)
            _check_text(arguments)
            if not arguments:
                _parser().print_help()
                return 0
            if arguments[0] not in targets:
                _refuse(arguments[0])
            return import_attribute(targets[arguments[0]])(arguments[1:])
        finally:
            sys.stdout.flush()
    except CamshaftError as error:
        return report_error(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _has_closed_output():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
            return BROKEN_PIPE
        if (status := report_file_error(error)) is None:
            raise
        return status
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        return report_file_error(BlockingIOError(errno.EAGAIN, _NO_THREAD)) or 1
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        if encoding == "utf-8":
            raise
        sys.stderr.write(f"camshaft: {error.object!a} cannot be encoded in {encoding}; set PYTHONUTF8=1\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


def _refuse(argument: str) -> None:
    """Print the help or the version, or report an argument that is not a command, and exit."""
    if argument.startswith("-"):
        _parser().parse_args([argument])  # exits
    raise ConfigError(_answer(argument))


def _answer(command: str) -> str:
    """Return the message about an unknown command, which may be an algorithm or something that is not implemented."""
    from camshaft.config.foreign.topics import topic_of_name
    from camshaft.config.schema.algorithm import ESTIMATORS
    from camshaft.config.short_names import RECIPES

    if (topic := topic_of_name(command)) is not None:
        return f"camshaft {command}: {topic.message()}"
    if command in (*ESTIMATORS, *RECIPES):
        return f"'{command}' is an algorithm. Write camshaft ppo algorithm={command} ..."
    written = {name: command for command, names in _OTHER_NAMES.items() for name in names}
    written |= {name: name for name, *_ in COMMANDS}
    name = command.replace("-", "_").lower()
    near = difflib.get_close_matches(name, written, n=1, cutoff=0.75)
    if name in written or near:
        hint = f"Write camshaft {written.get(name) or written[near[0]]}"
        return f"camshaft has no command '{command}'. {hint}{'' if hint.endswith('...') else '.'}"
    return f"camshaft has no command '{command}'. camshaft --help lists the commands."


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory has been deleted; change to another folder (`cd`)") from None


def _check_text(arguments: Sequence[str]) -> None:
    """Raise ConfigError if an argument is not text. Many libraries cannot open a file with such a name."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding()
            fix = "rename the file" if encoding == "utf-8" else "set PYTHONUTF8=1"
            text = ascii(mask_arguments([argument])[0])
            raise ConfigError(f"the argument {text} is not valid text in the encoding {encoding}; {fix}") from None


def _has_closed_output() -> bool:
    """Return True if the program that reads the output has ended, as in `camshaft config show | head`."""
    output = select.poll()
    try:
        output.register(sys.stdout, 0)
    except (OSError, ValueError):  # not a file
        return False
    return bool(output.poll(0))


def _parser() -> argparse.ArgumentParser:
    """Return the parser for `--help`, `--version` and unknown commands. Commands parse their arguments themselves."""
    parser = argparse.ArgumentParser(
        prog="camshaft",
        description="Reinforcement-learning post-training of language models on one training-engine interface.",
        epilog="camshaft COMMAND --help describes the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=f"camshaft {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.help, add_help=False)
    return parser
