"""The contract suite of controller backends.

roles.py      roles without a model that run on the ranks
harness.py    starts pools of the tested backend; helper functions of the rules
suite.py      `RULES`, `check_controller`, and the rules about results, pools and pending calls
failures.py   rules about errors, dead ranks and cleanup
"""
