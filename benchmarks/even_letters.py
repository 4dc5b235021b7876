"""Benchmark reward that costs almost no time: the share of characters with an even code."""


def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    return [sum(ord(letter) % 2 == 0 for letter in text) / max(len(text), 1) for text in solution_strs]
