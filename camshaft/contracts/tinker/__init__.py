"""The contract of servers of the Tinker API as a suite of rules, for any server that speaks it.

    target = Target("http://127.0.0.1:8080", "tml-...", base="models/tiny", folder="models/tiny")
    for verdict in check_tinker(target): ...

The suite needs the address of a server, a key, and the folder of a model that it serves. It sends requests over plain
HTTP with `camshaft.wire` (client.py), through a proxy with faults where a rule needs them (proxy.py), and computes what
it expects with transformers and torch in float64 (oracle.py). A server that refuses what a rule needs does not claim
it, which is not a violation.

    suite.py      the list of rules, and the check of a server
    harness.py    what rules use: clients, models, expected results, comparisons
    handshake.py  sessions, keys, fields, statuses, polls
    losses.py     log-probs, and values and gradients of losses
    updates.py    gradients, optimizer steps and adapters
    order.py      order, repetitions, lost answers, gaps and failed commands
    sampling.py   samples, stops and versions
    scoring.py    log-probs of prompts, and of tokens that were not sampled
    states.py     saved weights, several clients, and the restart of the server
"""
