"""Faster decode steps on a CPU."""
