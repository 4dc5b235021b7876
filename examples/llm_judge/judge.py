"""Score responses with a language model as judge, at any endpoint with the OpenAI chat API (vLLM, SGLang, a provider).

    export JUDGE_BASE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen3-8B      # and JUDGE_API_KEY, if required
    camshaft ppo reward=examples/llm_judge/judge.py ...

Failed requests and answers without a grade are retried twice. With the defaults, a call ends within 26 seconds, before
the time limit of a reward function (`custom_reward_function.timeout`, 30 seconds).
"""

import asyncio
import json
import os
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

INSTRUCTION = """Grade the answer to the question from 0 (useless) to 10 (perfect). A reference may be given.
Judge only whether the answer is correct and helpful, not its length. End with a line of the form "Grade: 7".

Question: {question}
Reference: {reference}
Answer: {answer}"""
ATTEMPTS, SECONDS = 3, float(os.environ.get("JUDGE_TIMEOUT", "8"))
THREADS = ThreadPoolExecutor(64)


async def judge(response, prompt, ground_truth=None):
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    text = INSTRUCTION.format(question=question, reference=ground_truth or "none", answer=response)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            answer = await asyncio.get_running_loop().run_in_executor(THREADS, _ask, text)
            return {"score": _grade(answer) / 10, "attempts": attempt}
        except (OSError, ValueError, LookupError, TypeError) as error:
            rejected = isinstance(error, urllib.error.HTTPError) and error.code in (400, 401, 403, 404)
            if rejected or attempt == ATTEMPTS:
                raise
            await asyncio.sleep(0.5 * 2 ** (attempt - 1))


def _ask(text):
    body = {"model": os.environ["JUDGE_MODEL"], "messages": [{"role": "user", "content": text}], "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', 'none')}"}
    url = os.environ["JUDGE_BASE_URL"].rstrip("/") + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def _grade(answer):
    grades = re.findall(r"grade\W*(\d+(?:\.\d+)?)", answer, re.IGNORECASE)
    if not grades or not 0 <= float(grades[-1]) <= 10:
        raise ValueError(f"no grade from 0 to 10 in the answer of the judge: {answer[-200:]!r}")
    return float(grades[-1])
