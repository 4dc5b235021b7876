"""`camshaft serve`: train and sample for programs that use the Tinker API.

camshaft serve model=models/tiny                     # prints two export lines for the other terminal
camshaft serve model=Qwen/Qwen3-0.6B=models/qwen     # clients ask for Qwen/Qwen3-0.6B
camshaft serve new_key=alice keys=keys.txt model=models/tiny
"""

import contextlib
import logging
import resource
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from camshaft.cli.usage import print_help
from camshaft.config.serve import ServeConfig, read_serve_config
from camshaft.errors import ConfigError

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MEGABYTE = 2**20
POLL_SECONDS = 0.1
"""Interval at which the command checks whether a signal has arrived."""
MAX_CLIENTS = 8
"""Number of clients that may have as many open polls as the SDK sends, at the same time."""
SPARE_FILES = 256
"""Number of files that the server opens besides connections."""
REQUEST_SECONDS = 60.0
"""Time limit for sending and receiving a request, and between two requests of a connection."""


def usage() -> str:
    """Return the help text, with all keys and their defaults."""
    lines = [
        "usage: camshaft serve model=FOLDER key=value ...   train and sample for programs that use the Tinker API",
        "",
        "The server prints the URL and the key for its clients. Ctrl-C saves the models and stops it.",
        "",
    ]
    for name, field in ServeConfig.model_fields.items():
        default = "" if field.is_required() else f" Default: {'null' if field.default is None else field.default}."
        lines.append(
            textwrap.fill(
                f"{name + '=':<17} {field.description}{default}", 110, initial_indent="  ", subsequent_indent=" " * 20
            )
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM, and return the exit status."""
    if print_help(argv, usage()):
        return 0
    config = read_serve_config(argv)
    if config.new_key is not None:
        from camshaft.service.keys import add_key

        assert config.keys is not None
        key = add_key(Path(config.keys), config.new_key)
        sys.stdout.write(f"{key}\nThis is the key of {config.new_key}; {config.keys} contains only its digest.\n")
        return 0
    return serve(config)


def serve(config: ServeConfig) -> int:
    """Start the worker process and the server."""
    from camshaft import storage
    from camshaft.fetch import fetch_models
    from camshaft.http import LocalServer, ServerLimits
    from camshaft.roles.sampled import SamplingWorker
    from camshaft.service import history
    from camshaft.service.app import MAX_POLLS, App
    from camshaft.service.keys import Keys
    from camshaft.service.process import RoleProcess
    from camshaft.service.service import Service
    from camshaft.service.store import LogError
    from camshaft.stop import handle_stop_signals

    fetch_models((folder, True) for folder in config.base_models().values())
    folder = Path(config.folder)
    storage.make_folder(folder)
    lock = storage.lock_folder(folder)
    if lock is None:
        raise ConfigError(f"another server uses folder={config.folder}; stop it, or set another folder")
    keys = Keys.load(folder, None if config.keys is None else Path(config.keys))
    logging.basicConfig(filename=folder / "log.txt", level=logging.INFO, format=LOG_FORMAT)
    logging.getLogger(history.__name__).addHandler(logging.StreamHandler())  # what each model waits for
    connections = allow_connections(MAX_CLIENTS * MAX_POLLS)
    limits = ServerLimits(connections, config.max_megabytes * MEGABYTE, REQUEST_SECONDS, "max_megabytes")
    with lock, RoleProcess(config) as role, contextlib.ExitStack() as stack:
        sampler = stack.enter_context(RoleProcess(config, SamplingWorker)) if config.sampling_ranks else None
        service = Service(config, role, sampler)
        with LocalServer(App(service, keys), limits, config.port, host=config.host) as server:
            service.start()
            server.start()
            sys.stdout.write(
                f"export TINKER_BASE_URL=http://{config.host}:{server.server_port}\n"
                f"export TINKER_API_KEY={keys.own_key}\n"
            )
            sys.stdout.flush()
            with handle_stop_signals(ctrl_c=True) as stop:
                while stop.requested is None and service.store.failure is None:
                    time.sleep(POLL_SECONDS)
        service.close()
    if service.store.failure is not None:
        raise LogError(service.store.failure)
    return 0


def allow_connections(count: int) -> int:
    """Let this process open a number of connections. Return the number that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit - SPARE_FILES, 1)
