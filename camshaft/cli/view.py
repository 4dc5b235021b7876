"""`camshaft view FOLDER...`: show runs on a live page, in a file or in the terminal.

camshaft view checkpoints/demo                          # prints the URL of the page
camshaft view checkpoints/demo --export runs.html       # one file that opens without a server
camshaft view checkpoints/demo --text                   # a table, for a terminal over ssh
camshaft view checkpoints/demo --socket view.sock       # ssh -L 8000:/path/view.sock HOST
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from camshaft.errors import ConfigError
from camshaft.tracking.run_folder import find_runs


def main(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C, or write it, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="camshaft view", description="Show the curves, responses and configs of runs on a page in the browser."
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", help="folder of a run, or a folder that contains runs")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--text", action="store_true", help="print a table and advice instead")
    output.add_argument("--export", type=Path, metavar="FILE", help="write the page to one HTML file instead")
    output.add_argument("--socket", type=Path, metavar="PATH", help="listen on a Unix socket that only you can open")
    output.add_argument("--port", type=int, default=0, help="port on the loopback interface; a free one by default")
    args = parser.parse_args(argv)
    if not find_runs(*args.folders):
        raise ConfigError(f"{', '.join(args.folders)}: no run found; name the folder of a run")
    if args.text:
        sys.stdout.write(_text(args.folders) + "\n")
        return 0
    if args.export is not None:
        from camshaft.view.export import export

        count = export(args.folders, args.export)
        sys.stdout.write(f"wrote {args.export}: {count} {'run' if count == 1 else 'runs'}\n")
        return 0
    from camshaft.view.server import PageServer

    with PageServer(args.folders, args.port, args.socket) as server:
        place = f"socket: {args.socket}\n" if args.socket else ""
        sys.stdout.write(f"{place}{server.url}\nCtrl-C ends the page.\n")
        sys.stdout.flush()
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
    return 0


def _text(folders: Sequence[str]) -> str:
    from camshaft.view.advice import advise
    from camshaft.view.text import runs_table

    runs, now = find_runs(*folders), time.time()
    lines = [runs_table(runs, now)]
    for run in runs:
        lines += [f"\n{run.name}: {advice.title}\n  {advice.text}" for advice in advise(run, now)]
    return "\n".join(lines)
