"""Killable processes that answer calls within time limits, and the processes that user code starts in them.

    worker = Worker("my_package.my_worker", setup, 120.0, write)    # `main` of the module runs in a new process
    worker.submit([(key, payload)], timeout=30.0)
    ready, events = wait_for([worker], until)                       # Ready, Answer or Failure, with the worker
    worker.kill()                                                   # with all processes below it

    def main(stack_file):                                           # in my_package/my_worker.py
        parent = Parent(int(stack_file))
        setup = parent.get()
        parent.ready(None)
        parent.serve(call, call_async)                              # until the parent closes the worker

`worker.py` is the side of the owner and `child.py` that of the process; `messages.py` contains what they exchange. A
guard (`guard.py`) between the two ends all processes that the code has started (`processes.py`), also if the worker or
its owner is killed.
"""
