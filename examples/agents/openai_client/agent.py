"""The game of `higher_lower.py` as a program that owns the conversation, with the client of OpenAI."""

from openai import AsyncOpenAI


async def solve(base_url, api_key, prompt, ground_truth):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    *history, question = prompt
    messages = [*history, {**question, "content": question["content"] + "Guess a number from 1 to 9."}]
    for _ in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        answer = reply.choices[0].message.content
        if answer.strip() == str(ground_truth):
            return 1.0
        hint = "higher" if answer.strip() < str(ground_truth) else "lower"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": hint}]
    return 0.0
