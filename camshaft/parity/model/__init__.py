"""Compares a model on an engine with plain transformers in float64, and names what differs: `camshaft check-model`.

with prepare(folder) as prepared:
    for result in check_model(Case(prepared), log): ...

folders.py    the compared folder: fewer layers, random weights, a short sliding window
oracle.py     plain transformers in float64, and variants of it with one change
changes.py    the changes that re-implementations make by mistake
checks.py     outputs, packing, prompt sharing, gradients and generation, head by head
diagnosis.py  finds the change that explains a difference
report.py     runs the command and prints its report
"""
