"""Train a model with reinforcement learning to write digits, through the Tinker API.

    camshaft serve model=models/tiny                # in another terminal; set the variables that it prints
    python examples/tinker/rl_loop.py
    python examples/tinker/rl_loop.py --ahead       # with `camshaft serve model=models/tiny sampling_ranks=1`

Each step samples from the current weights, centers the rewards of a prompt's samples, and trains with importance
sampling. The last number of a line is the largest difference between a sampled log-prob and the one that the training
engine computes for the same token.

With --ahead, the server samples for the next step while it trains. These samples are from the weights before the last
step, so the differences are those between two steps.
"""

import argparse
from typing import Any

import tinker
from tinker import types

PROMPTS = [f"Write digits. Seed: {number}" for number in range(4)]
SAMPLES, MAX_TOKENS, STEPS = 8, 12, 8


def reward(text: str) -> float:
    """Return the share of characters that are digits."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def datum(prompt: list[int], sample: types.SampledSequence, advantage: float) -> types.Datum:
    """Return a row whose loss counts the sampled tokens."""
    ids, before = prompt + list(sample.tokens), len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "logprobs": [0.0] * before + list(sample.logprobs),
            "advantages": [0.0] * before + [advantage] * len(sample.tokens),
        },
    )


def request_samples(trainer: tinker.TrainingClient, prompts: list[list[int]]) -> list[Any]:
    """Return a future for each prompt, with samples of the current weights."""
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=MAX_TOKENS, stop=[])
    return [
        sampler.sample(types.ModelInput.from_ints(prompt), num_samples=SAMPLES, sampling_params=params)
        for prompt in prompts
    ]


def main(base_model: str, ahead: bool) -> None:
    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(base_model=base_model, rank=16, seed=0).result()
    tokenizer = trainer.get_tokenizer()
    prompts = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
    requested = []
    for step in range(STEPS):
        pending = requested or request_samples(trainer, prompts)
        data, rewards = [], []
        for prompt, future in zip(prompts, pending, strict=True):
            samples = future.result().sequences
            group = [reward(tokenizer.decode(sample.tokens)) for sample in samples]
            mean = sum(group) / len(group)
            data += [datum(prompt, sample, r - mean) for sample, r in zip(samples, group, strict=True)]
            rewards += group
        if ahead and step + 1 < STEPS:  # generated while the model is trained
            requested = request_samples(trainer, prompts)
        passes = trainer.forward_backward(data, loss_fn="importance_sampling")
        update = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        outputs = passes.result().loss_fn_outputs
        update.result()
        differences = [
            abs(trained - sampled)
            for output, row in zip(outputs, data, strict=True)
            for trained, sampled in zip(output["logprobs"].data, row.loss_fn_inputs["logprobs"].data, strict=True)
            if sampled != 0.0
        ]
        print(
            f"step {step + 1}: reward {sum(rewards) / len(rewards):.3f}, difference {max(differences):.1e}", flush=True
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("base_model", nargs="?", default="models/tiny")
    parser.add_argument("--ahead", action="store_true", help="sample for the next step while the model is trained")
    main(**vars(parser.parse_args()))
