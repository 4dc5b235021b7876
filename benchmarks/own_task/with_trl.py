"""The task with TRL 1.16."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def share(completions, letters, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c in row for c in text) / max(len(text), 1) for text, row in zip(texts, letters, strict=True)]


data = load_dataset("json", data_files={"train": "train.jsonl", "val": "val.jsonl"})
config = GRPOConfig(
    output_dir="runs/trl",
    max_steps=40,
    learning_rate=3e-3,
    per_device_train_batch_size=128,
    max_completion_length=16,
    eval_strategy="steps",
    eval_steps=20,
    use_cpu=True,
)
trainer = GRPOTrainer(
    model="models/tiny",
    args=config,
    train_dataset=data["train"],
    eval_dataset=data["val"],
    reward_funcs=share,
)
trainer.train()
trainer.save_model("models/trl")
