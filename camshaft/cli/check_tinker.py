"""`camshaft check-tinker`: check a server of the Tinker API against the contract.

camshaft check-tinker http://127.0.0.1:8080 key=tml-... model=models/tiny
"""

import argparse
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from urllib.parse import urlsplit

from camshaft.cli.check import add_report_options, report
from camshaft.errors import ConfigError
from camshaft.masking import remember_arguments

KEYS = ("key", "model", "base", "other_key", "dtype", "gap_timeout")
END_SECONDS = 10.0
"""Time limit for the server to end after the command that restarts it."""
RESTART_SECONDS = 120.0
"""Time limit for the server to answer after a restart."""


def main(argv: Sequence[str]) -> int:
    """Check a server, and return exit status 1 if it breaks a rule."""
    options = _parser().parse_intermixed_args(argv)
    remember_arguments(argv)
    values = _read_values(options.words)
    from camshaft.contracts.tinker.client import Client, Refused
    from camshaft.contracts.tinker.harness import Target
    from camshaft.contracts.tinker.suite import RULES, check_tinker

    client = Client(options.url.rstrip("/"), values["key"], values.get("base", ""))

    def served() -> list[str]:
        models = client.call("GET", "get_server_capabilities")["supported_models"]
        return [model["model_name"] for model in models]

    def is_up() -> bool:
        try:
            served()
        except (OSError, HTTPException, Refused, ValueError, LookupError, TypeError):
            return False
        return True

    try:
        base = _choose_base(values.get("base"), served())
    except Refused as error:
        raise ConfigError(f"{client.url} refuses the first request: {error}. Check key= and the URL") from error
    except (OSError, HTTPException) as error:
        raise ConfigError(f"{client.url} does not answer: {error}. Check the URL") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{client.url} is not a server of the Tinker API: get_server_capabilities has no list of models "
            f"({type(error).__name__}: {error}). Check the URL"
        ) from error
    target = Target(
        client.url,
        client.key,
        base,
        values["model"],
        dtype=values.get("dtype", "float32"),
        gap_timeout=float(values.get("gap_timeout", 300)),
        other_key=values.get("other_key"),
        restart=_restart(options.restart, client.url, is_up) if options.restart else None,
    )
    return report(client.url, RULES, lambda rules: check_tinker(target, rules), options)


def _read_values(words: Sequence[str]) -> dict[str, str]:
    """Return the arguments of the form key=value. The key is that of the environment by default."""
    values = {"key": os.environ.get("TINKER_API_KEY", "")}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in KEYS or not equals:
            raise ConfigError(f"'{word}' is not an argument of check-tinker; its keys are {', '.join(KEYS)}")
        values[name] = value
    if not values["key"] or not values.get("model"):
        raise ConfigError("check-tinker needs key=KEY of the server, and model=FOLDER of a model that it serves")
    if values.get("dtype", "float32") not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype={values['dtype']} is unknown; set float32, bfloat16 or float16")
    if not values.get("gap_timeout", "1").replace(".", "", 1).isdecimal():
        raise ConfigError(f"gap_timeout={values['gap_timeout']} is not a number of seconds")
    return values


def _choose_base(name: str | None, served: Sequence[str]) -> str:
    """Return the name of the base model, which is that of the server if it serves one model only."""
    if name is None and len(served) == 1:
        return served[0]
    if name is None or name not in served:
        raise ConfigError(f"the server has the models {', '.join(served)}; set base=NAME to the one in model=FOLDER")
    return name


def _restart(command: str, url: str, is_up: Callable[[], bool]) -> Callable[[], None]:
    """Return a function that runs a command, and waits until the server has ended and answers again."""
    parts = urlsplit(url)
    address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    def restart() -> None:
        with socket.create_connection(address, RESTART_SECONDS) as connection:
            subprocess.run(shlex.split(command), check=True, timeout=RESTART_SECONDS)
            if not _is_closed(connection):
                raise ConfigError(
                    f"the server was not killed: {END_SECONDS:g} s after --restart {command}, a connection from before "
                    "is open. Correct the command, and use a URL without a proxy"
                )
        deadline = time.monotonic() + RESTART_SECONDS
        while not is_up():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server does not answer {RESTART_SECONDS:g} s after --restart {command}")
            time.sleep(0.2)

    return restart


def _is_closed(connection: socket.socket) -> bool:
    """Return True if the other side closes a connection."""
    connection.settimeout(END_SECONDS)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="camshaft check-tinker",
        usage="camshaft check-tinker URL key=KEY model=FOLDER [key=value ...] [options]",
        description="Check a server of the Tinker API against its contract, over HTTP: log-probs, losses, gradients "
        "and optimizer steps against transformers and torch in float64, and order, repetitions, lost answers, samples, "
        "saved weights and restarts. Use a small model in float32, and a server that nobody else uses. Exit status: 0 "
        "if no rule is broken, 1 if one is, 2 if an argument is invalid. A rule about something that the server "
        "refuses is reported as not claimed.",
        epilog="keys: key=KEY of the server (default: TINKER_API_KEY); model=FOLDER with the weights that it serves; "
        "base=NAME of this model on the server, if it serves several; other_key=KEY of another user; dtype= in which "
        "the server computes (default: float32); gap_timeout=SECONDS after which the server gives up waiting for a "
        "missing command (default: 300)",
    )
    parser.add_argument("url", metavar="URL", help="address of the server, such as http://127.0.0.1:8080")
    parser.add_argument("words", nargs="*", metavar="key=value", help="what the suite has to know; see below")
    parser.add_argument(
        "--restart", metavar="COMMAND", help="command that kills the server and starts it again at the same address"
    )
    add_report_options(parser)
    return parser
