"""The process rollout, which runs any other rollout in a child process on the same machine.

rollout.py  `ProcessRollout`, which runs in the trainer and starts the child process
child.py    the child process, which builds the inner rollout and answers requests
"""
