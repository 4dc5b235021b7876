"""The task with camshaft."""

import camshaft


def share(response, letters):
    return sum(c in letters for c in response) / max(len(response), 1)


run = camshaft.train(
    model="models/tiny",
    data="train.jsonl",
    val_data="val.jsonl",
    reward=share,
    algorithm="grpo",
    steps=40,
    lr=3e-3,
    batch=16,
    response_length=16,
    out="runs/camshaft",
)
run.export("models/camshaft")
