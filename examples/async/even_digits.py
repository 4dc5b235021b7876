"""Reward of the example: the share of even digits in the response."""


def compute_score(response: str) -> float:
    return sum(character in "02468" for character in response) / max(len(response), 1)
