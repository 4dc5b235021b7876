"""Train a model on two ranks with an engine and a training loop, without roles or a controller.

    torchrun --nproc-per-node 2 examples/engine/train.py out/counting
    torchrun --nproc-per-node 2 examples/engine/train.py out/counting cuda

The model learns to count: each row of the data set increases by one per token.
"""

import sys

import torch
import torch.distributed as dist

from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import EngineConfig, EngineModel, OptimConfig, build_engine
from camshaft.models.tiny import make_tiny_model, make_tiny_tokenizer


def loss_fn(data, predictions, ctx):
    """Compute the negative log-likelihood, divided by the token count of the full mini-batch over all ranks."""
    return -(predictions["log_probs"].values * data["loss_mask"].values).sum() / ctx["num_tokens"], ctx


def main(out: str, device: str = "cpu") -> None:
    dist.init_process_group("gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl")
    make_tiny_tokenizer(f"{out}/model")
    make_tiny_model(f"{out}/model", hidden=32, layers=2, heads=4, kv_heads=2)  # written by rank 0
    dist.barrier()

    model = EngineModel(path=f"{out}/model")
    engine = build_engine("fsdp", EngineConfig(model=model, optim=OptimConfig(lr=3e-3), device=device))
    engine.init_model()
    engine.set_loss_fn(loss_fn)
    random = torch.Generator().manual_seed(engine.seat.dp_rank)  # each rank draws different rows
    for step in range(60):
        starts = torch.randint(3, 20, (8,), generator=random).tolist()
        batch = DataProto.from_dict({"input_ids": Ragged.from_rows([torch.arange(s, s + 8) for s in starts])})
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(batch)
        norm = engine.optimizer_step()
        engine.lr_scheduler_step()
        if step % 10 == 9 and engine.seat.rank == 0:
            print(f"step {step + 1}: loss {float(loss):.4f}, gradient norm {norm:.3f}", flush=True)
    engine.save_checkpoint(f"{out}/global_step_60", global_step=60)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
