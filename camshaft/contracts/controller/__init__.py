"""The controller contract.

roles.py      roles without a model, which run on the ranks
harness.py    pools of a backend, and helpers of the rules
suite.py      the rules on results and pending calls
failures.py   the rules on errors, deaths and cleanup
"""
