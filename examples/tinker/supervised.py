"""Fine-tune on questions and answers through the Tinker API, and continue from a saved state.

    camshaft serve model=models/tiny                # in another terminal; set the variables that it prints
    python examples/tinker/supervised.py            # prints the paths of saved states
    python examples/tinker/supervised.py --resume tinker://SESSION:train:0/weights/step-8

The loss is the mean over the tokens of the answers. The batch of a step depends on its number only, and a state has the
optimizer, so a run that is continued has the losses of one that was not interrupted.
"""

import argparse
import random

import tinker
from tinker import types

ANSWERS = {f"What is {a} + {b}?": f" {a + b}" for a in range(1, 6) for b in range(1, 6)}
STEPS, BATCH, SAVE_EVERY = 16, 8, 8


def datum(question: list[int], answer: list[int]) -> types.Datum:
    """Return a row whose loss counts the tokens of the answer."""
    ids = question + answer
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [0.0] * (len(question) - 1) + [1.0] * len(answer)},
    )


def main(base_model: str, resume: str | None, steps: int) -> None:
    service = tinker.ServiceClient()
    if resume is None:
        trainer, first = service.create_lora_training_client(base_model=base_model, rank=16, seed=0).result(), 0
    else:
        trainer = service.create_training_client_from_state_with_optimizer(resume).result()
        first = int(resume.rpartition("-")[2])
    tokenizer = trainer.get_tokenizer()
    rows = [
        tuple(tokenizer.encode(text, add_special_tokens=False) for text in (question, answer))
        for question, answer in ANSWERS.items()
    ]
    for step in range(first + 1, steps + 1):
        batch = random.Random(step).sample(rows, BATCH)
        passes = trainer.forward_backward([datum(*row) for row in batch], loss_fn="cross_entropy")
        update = trainer.optim_step(types.AdamParams(learning_rate=5e-3))
        loss = passes.result().metrics["loss:sum"] / sum(len(answer) for _, answer in batch)
        update.result()
        print(f"step {step}: loss {loss:.6f}", flush=True)
        if step % SAVE_EVERY == 0:
            print("saved as", trainer.save_state(f"step-{step}").result().path, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("base_model", nargs="?", default="models/tiny")
    parser.add_argument("--resume", metavar="PATH", help="saved state to continue from")
    parser.add_argument("--steps", type=int, default=STEPS, help="number of the last step")
    main(**vars(parser.parse_args()))
