"""The game of `higher_lower.py` as a command: the row on standard input, the reward on standard output.

It runs with any Python, and imports nothing of camshaft. Its URL and key are in the environment.
"""

import json
import os
import sys
import urllib.request


def ask(messages):
    """Return the message with which the policy answers."""
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def play(row):
    """Return 1 if the policy finds the number within three answers."""
    *history, question = row["prompt"]
    messages = [*history, {**question, "content": question["content"] + "Guess a number from 1 to 9."}]
    for _ in range(3):
        messages.append(ask(messages))
        answer = messages[-1]["content"].strip()
        if answer == str(row["ground_truth"]):
            return 1.0
        messages.append({"role": "user", "content": "higher" if answer < str(row["ground_truth"]) else "lower"})
    return 0.0


if __name__ == "__main__":
    print(json.dumps({"reward": play(json.load(sys.stdin))}))
