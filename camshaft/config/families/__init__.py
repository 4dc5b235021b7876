"""Families of models: what they support, known before a model is built.

support.py    reasons why a family lacks a feature, by the values of its config.json
"""
