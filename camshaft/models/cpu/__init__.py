"""Autograd nodes for CPUs."""
