"""GRPO as a loop over an engine and a rollout: no trainer, no roles, no config file, no worker processes.

    python examples/grpo_loop.py                                    # a tiny model learns to write digits
    python examples/grpo_loop.py models/Qwen2.5-0.5B-Instruct cuda  # any model folder, on a GPU

For another task, replace `PROMPTS` and `reward`; for another algorithm, `group_advantages` and `loss_fn`.
"""

import sys

import torch

from camshaft.algorithms import Clip, Counts, group_advantages, policy_loss
from camshaft.data import encode_prompts
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import EngineConfig, EngineModel, OptimConfig, build_engine
from camshaft.models.loader import load_tokenizer
from camshaft.models.tiny import make_tiny_model
from camshaft.reshard import rollout_mode
from camshaft.rollout import RolloutEngineConfig, SamplingParams, build_rollout

PROMPTS = [f"Write digits. Seed: {seed}" for seed in range(64)]
STEPS, BATCH, RESPONSES, MINI_BATCH = 40, 16, 8, 64
SAMPLING = SamplingParams(max_tokens=16)
CLIP = Clip(low=0.2, high=0.28)


def reward(response: str) -> float:
    """Return the share of characters that are digits."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def loss_fn(data, predictions, ctx):
    """Compute the clipped policy loss on the response tokens of a micro-batch."""
    counts = Counts.of(data["loss_mask"], ctx)
    log_probs, old_log_probs, advantages = predictions["log_probs"], data["old_log_probs"], data["advantages"]
    loss, ctx["metrics"] = policy_loss(
        log_probs.values, old_log_probs.values, advantages.values, counts, clip=CLIP, mode="token-mean"
    )
    return loss, ctx


def main(model: str = "", device: str = "cpu") -> None:
    model = model or str(make_tiny_model("models/tiny"))
    tokenizer = load_tokenizer(model)
    ids = encode_prompts([[{"role": "user", "content": prompt}] for prompt in PROMPTS], tokenizer)
    optim = OptimConfig(lr=3e-3)
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=model), optim=optim, device=device))
    engine.init_model()
    rollout = build_rollout("torch", RolloutEngineConfig(model_path=model, device=device, seed=1))
    groups = torch.arange(BATCH).repeat_interleave(RESPONSES)
    for step in range(STEPS):
        prompts = Ragged.from_rows([ids[(step * BATCH + group) % len(ids)] for group in groups.tolist()])
        with rollout_mode(engine, rollout):  # sends the weights and compares their checksums
            out = rollout.generate_sequences(prompts, SAMPLING)
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in out.responses.rows()]
        scores = torch.tensor([reward(text) for text in texts])
        advantages = group_advantages(scores, groups)
        # The log-probs of the rollout serve as old log-probs, because it has sampled with the weights of the engine.
        batch = DataProto.from_responses(
            prompts,
            out.responses,
            old_log_probs=out.log_probs,
            advantages=out.responses.like(advantages[out.responses.row_ids()]),
        )
        with engine.train_mode():
            results = [
                engine.train_batch(rows, loss_fn=loss_fn) for rows in batch.make_iterator(MINI_BATCH, 1, seed=step)
            ]
        engine.lr_scheduler_step()
        print(f"step {step + 1}: reward {scores.mean():.3f}, gradient norm {results[-1].grad_norm:.3f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
