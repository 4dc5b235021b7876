"""Contract suites: rules that implementations of camshaft's interfaces are tested against.

rules.py     rules, verdicts, and the functions that check them
engine/      the contract of `BaseEngine`
rollout/     the contract of `BaseRollout`
controller/  the contract of a controller backend
tinker/      the contract of a server of the Tinker API
"""
