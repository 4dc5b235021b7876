"""Fine-tune a model on one sentence through the Tinker API, save it, and sample from it.

camshaft serve model=models/tiny                # in another terminal; set the variables that it prints
pip install tinker==0.38.0
python examples/tinker/quickstart.py
"""

import sys

import tinker
from tinker import types

SENTENCE = "The cat sat on the mat."
STEPS = 20


def datum(ids: list[int]) -> types.Datum:
    """Return a row in which each token is the target of the tokens before it."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )


def main(base_model: str) -> None:
    service = tinker.ServiceClient()  # reads TINKER_BASE_URL and TINKER_API_KEY
    trainer = service.create_lora_training_client(base_model=base_model, rank=8, seed=0).result()
    tokenizer = trainer.get_tokenizer()
    ids = tokenizer.encode(SENTENCE, add_special_tokens=False)
    for step in range(STEPS):
        passes = trainer.forward_backward([datum(ids)], loss_fn="cross_entropy")
        update = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        loss = passes.result().metrics["loss:sum"] / (len(ids) - 1)
        update.result()
        print(f"step {step + 1}: loss {loss:.4f}", flush=True)
    print("saved as", trainer.save_state("quickstart").result().path)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    start = ids[: len(ids) // 2]
    prompt = types.ModelInput.from_ints(start)
    params = types.SamplingParams(max_tokens=len(ids) - len(start), temperature=0.0)
    sample = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
    print(f"after {tokenizer.decode(start)!r}: {tokenizer.decode(sample.sequences[0].tokens)!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "models/tiny")
