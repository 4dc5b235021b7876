"""A program for workers: answers with its payload, and acts on some of them."""

import asyncio
import os
import signal
import subprocess
import time
from typing import Any

from camshaft.workers.child import Parent


def main(stack_file: str) -> None:
    parent = Parent(int(stack_file))
    setup = parent.get()
    if setup == "exit":
        os._exit(5)
    if setup == "hang":
        time.sleep(1000)
    parent.ready(("ready", setup))
    parent.serve(call, call_async)


def call(payload: Any) -> Any:
    match payload:
        case ("sleep", seconds):
            time.sleep(seconds)
        case ("exit", code):
            os._exit(code)
        case ("signal", number):
            os.kill(os.getpid(), number)
        case ("kill parent",):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        case ("start",):
            return subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True).pid
        case ("status",):
            return subprocess.run(["/bin/sh", "-c", "kill -9 $$"], check=False).returncode
    return payload


async def call_async(payload: Any) -> Any:
    match payload:
        case ("sleep", seconds):
            await asyncio.sleep(seconds)
        case ("suppress",):
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                return "suppressed"
    return payload
