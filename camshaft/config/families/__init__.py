"""Families of models: what they support, known before a model is built.

support.py      reasons why a family lacks a feature, by the values of its config.json
known.py        facts about the model types of the tested transformers, and what vLLM and SGLang list
conflicts.py    checks of engines with the values of a config.json
table.py        support of a family by engines and rollouts
"""
