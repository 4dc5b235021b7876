"""One pipeline stage of a transformers model.

    stage = PipelineStage(load_model(...), group, micro_batches=2)    # collective over the ranks of `group`
    outputs = stage(tokens, packing, at, ("log_probs",))              # the same outputs on every stage
    loss_of(outputs).backward()                                       # gradients of the outputs
    stage.backward()                                                  # gradients of the parameters

The schedule is GPipe: all micro-batches of a call run forward, then all run backward in reverse order. The last
stage broadcasts the outputs, so that every stage computes the same loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from camshaft.device import to_device
from camshaft.errors import EngineError
from camshaft.models.attention import packed_kwargs
from camshaft.models.packed import OpaqueTensor, PackedModel, output_layer, unwrap
from camshaft.models.packing import Packing


@dataclass
class Activations:
    """Tensors of one call between its forward and its backward pass."""

    inputs: list[Tensor | None] = field(default_factory=list)
    """Hidden states received from the previous stage, per micro-batch; None on the first stage."""
    hidden: list[Tensor] = field(default_factory=list)
    """Hidden states of this stage, per micro-batch."""
    head_input: Tensor | None = None
    """Hidden states of all micro-batches, on the last stage, as are the outputs of the head."""
    head_outputs: dict[str, Tensor] = field(default_factory=dict)
    predictions: dict[str, Tensor] = field(default_factory=dict)
    """Leaf tensors that the loss reads."""


class PassThrough(nn.Module):
    """Replaces a module that another stage holds."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class PipelineStage(PackedModel):
    """The layers of this rank; parameters keep their names in `transformers`."""

    def __init__(self, full: PackedModel, group: dist.ProcessGroup, micro_batches: int):
        super().__init__(full.hf, full.head)
        if self.pads_rows:
            raise EngineError(f"{type(self.hf).__name__} does not run on packed rows; train it with another engine")
        self.group, self.micro_batches = group, micro_batches
        self.index, self.last = dist.get_rank(group), dist.get_world_size(group) - 1
        if micro_batches > 1:  # rows with a shared prefix would have to stay in one micro-batch
            self.supports_prefix_sharing = False
        output: Any = output_layer(self.hf, self.head)
        self.dtype, self.vocabulary = self.hf.dtype, len(output.weight)
        modules = modules_of_stages(self.hf, output, self.last + 1)
        self.stage_of = locate_weights(self.hf, modules)
        self.templates = {name: weight.to("meta") for name, weight in self.hf.named_parameters()}
        embedding: Any = self.hf.get_input_embeddings()
        tied = self.last > 0 and embedding in modules[-1] and self.index in (0, self.last)
        self.tied: nn.Parameter | None = embedding.weight if tied else None
        """The embedding that the first and the last stage share; None on other stages and for untied models."""
        for name, module in list(self.hf.named_modules()):
            if any(module in stage for stage in modules) and module not in modules[self.index]:
                self.hf.set_submodule(name, PassThrough())
        self._activations = Activations()

    def forward(
        self,
        tokens: Tensor,
        packing: Packing,
        at: Tensor | OpaqueTensor,
        outputs: Sequence[str],
        temperature: float = 1.0,
        log_q: Tensor | OpaqueTensor | None = None,
    ) -> dict[str, Tensor]:
        at, log_q = unwrap(at), None if log_q is None else unwrap(log_q)
        self.check_inputs(tokens, packing, at, outputs)
        training, saved = torch.is_grad_enabled(), Activations()
        if training:  # a call without gradients may come between a forward and its backward pass
            self._activations = saved
        sends = self._run_layers(tokens, packing, saved)
        if self.index == self.last:
            saved.head_input = torch.cat([hidden.detach()[0] for hidden in saved.hidden]).requires_grad_(training)
            before = packing.ends - 1 if self.head == "reward" else packing.previous(at)
            rows = saved.head_input.index_select(0, to_device(before, tokens.device))
            saved.head_outputs = self.apply_head(rows, tokens, at, outputs, temperature, log_q)
        for name in outputs:
            prediction = self._broadcast(name, saved.head_outputs.get(name), len(packing.lengths), len(at))
            saved.predictions[name] = prediction.requires_grad_(training and name != "distribution")
        _wait(sends)
        return dict(saved.predictions)

    def _run_layers(self, tokens: Tensor, packing: Packing, saved: Activations) -> list[dist.Work]:
        """Run the layers on each micro-batch, as soon as its hidden states arrive; return the sends in progress."""
        sends = []
        for part, packed in self._split(packing):
            received = None
            source = {"input_ids": tokens[None, part]}
            if self.index > 0:
                shape = (1, packed.size, self.hf.config.get_text_config().hidden_size)
                received = self._receive(shape, self.index - 1).requires_grad_(torch.is_grad_enabled())
                source = {"inputs_embeds": received}
            hidden = self.hf.base_model(**source, **packed_kwargs(packed, tokens.device)).last_hidden_state
            if self.index < self.last:
                sends.append(self._send(hidden, self.index + 1))
            saved.inputs.append(received)
            saved.hidden.append(hidden)
        return sends

    def backward(self) -> None:
        """Add the gradients of this stage's parameters, after the backward pass of the loss."""
        saved, self._activations = self._activations, Activations()
        of_hidden = self._backward_of_head(saved) if self.index == self.last else ()
        sends = []
        for number in reversed(range(len(saved.hidden))):
            received, hidden = saved.inputs[number], saved.hidden[number]
            last = self.index == self.last
            hidden.backward(of_hidden[number] if last else self._receive(hidden.shape, self.index + 1))
            if received is not None:
                assert received.grad is not None
                sends.append(self._send(received.grad, self.index - 1))
        _wait(sends)

    def _backward_of_head(self, saved: Activations) -> Sequence[Tensor]:
        """Return the gradients of the last hidden states, per micro-batch."""
        assert saved.head_input is not None
        pairs = [(saved.head_outputs[name], p.grad) for name, p in saved.predictions.items() if p.grad is not None]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        gradient = torch.zeros_like(saved.head_input) if saved.head_input.grad is None else saved.head_input.grad
        return gradient[None].split([hidden.shape[1] for hidden in saved.hidden], dim=1)

    def sum_tied_gradient(self) -> None:
        """Add the gradients of the first and the last stage for a tied embedding; both get the same bits."""
        if self.tied is None or self.tied.grad is None:
            return
        peer, received = self.last - self.index, torch.empty_like(self.tied.grad)
        operations = [
            dist.P2POp(dist.isend, self.tied.grad, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=peer),
        ]
        _wait(dist.batch_isend_irecv(operations))
        self.tied.grad += received

    def _split(self, packing: Packing) -> Iterator[tuple[slice, Packing]]:
        """Yield the tokens of each micro-batch: consecutive rows, in nearly equal numbers."""
        if self.micro_batches == 1:
            yield slice(0, packing.size), packing
            return
        start = 0
        for lengths in torch.tensor(packing.lengths).tensor_split(min(self.micro_batches, len(packing.lengths))):
            stop = start + int(lengths.sum())
            yield slice(start, stop), Packing(lengths.tolist())
            start = stop

    def _send(self, tensor: Tensor, stage: int) -> dist.Work:
        work = dist.isend(tensor.detach().contiguous(), group=self.group, group_dst=stage)
        assert work is not None, "this rank is in the group"
        return work

    def _receive(self, shape: Sequence[int], stage: int) -> Tensor:
        tensor = torch.empty(*shape, dtype=self.dtype, device=self.device)
        dist.recv(tensor, group=self.group, group_src=stage)
        return tensor

    def _broadcast(self, name: str, output: Tensor | None, rows: int, tokens: int) -> Tensor:
        """Return an output of the head on every stage, without its graph."""
        if output is None:
            shape = {"scores": (rows,), "distribution": (tokens, self.vocabulary)}.get(name, (tokens,))
            output = torch.empty(*shape, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        values = output.detach().contiguous()
        dist.broadcast(values, group=self.group, group_src=self.last)
        return values

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def modules_of_stages(hf: PreTrainedModel, output: nn.Module, stages: int) -> list[list[nn.Module]]:
    """Return the modules of each stage: the embedding, nearly equal numbers of layers, then the norm and the head."""
    base: Any = hf.base_model
    layers: list[nn.Module] = list(getattr(base, "layers", ()))
    norm = getattr(base, "norm", None)
    embedding: Any = hf.get_input_embeddings()
    if norm is None or not layers:
        raise EngineError(
            f"{type(hf).__name__} cannot be split into stages: its base model needs `layers` and `norm`, as llama and "
            "qwen2 have them; choose another engine"
        )
    if len(layers) < stages:
        raise EngineError(f"pipeline_size={stages} exceeds the {len(layers)} layers of the model; use {len(layers)}")
    bounds = [len(layers) * stage // stages for stage in range(stages + 1)]
    modules: list[list[nn.Module]] = [layers[start:stop] for start, stop in pairwise(bounds)]
    modules[0].append(embedding)
    modules[-1] += [norm, output]
    if output.weight is embedding.weight and stages > 1:
        modules[-1].append(embedding)  # the head reads its weight under the name of the embedding
    return modules


def locate_weights(hf: nn.Module, modules: Sequence[Sequence[nn.Module]]) -> dict[str, int]:
    """Return the first stage of each weight, by its name in `transformers`; tied weights once."""
    stage_of = {
        id(parameter): stage
        for stage in reversed(range(len(modules)))
        for module in modules[stage]
        for parameter in module.parameters()
    }
    stray = [name for name, tensor in hf.state_dict(keep_vars=True).items() if id(tensor) not in stage_of]
    if stray:
        raise EngineError(f"{type(hf).__name__} has weights outside its layers ({stray[0]}); choose another engine")
    return {name: stage_of[id(parameter)] for name, parameter in hf.named_parameters()}
