"""The process rollout: runs any other rollout in a child process on the same machine.

rollout.py  `ProcessRollout`, in the trainer
child.py    the child process, which builds the rollout and answers requests
"""
