"""Replay a recorded layer: its forward, its backward, and the gradients of its parameters."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.core.errors import SwapError
from lightning_fastft.graphs.buckets import load_rows

if TYPE_CHECKING:
    from lightning_fastft.graphs.layer_graphs import LayerGraphs
    from lightning_fastft.graphs.recordings import Recording


class Run:
    """A forward of a recorded layer and its backward."""

    def __init__(self, graphs: LayerGraphs, recording: Recording) -> None:
        self._graphs, self._recording = graphs, recording
        self.is_over = False
        # Tokens of the pack; the recording may have further rows.
        self._num_tokens = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer for hidden states."""
        recording = self._recording
        self._graphs.open_runs.add(self)
        recording.open_run = weakref.ref(self)
        self._num_tokens = hidden.shape[1]
        if hidden.data_ptr() != recording.hidden.data_ptr():
            load_rows(recording.hidden, hidden)
        assert recording.forward is not None
        recording.forward()
        return recording.out[:, : self._num_tokens].detach()

    def backward(self, d_out: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of the hidden states; parameter gradients are in the buffers of the recording."""
        if self.is_over:
            raise SwapError(
                "Second backward through recorded layers: the first one freed the saved tensors. Use "
                "FusedKernels(cuda_graphs=False)."
            )
        self.is_over = True
        recording = self._recording
        self._graphs.open_runs.discard(self)
        if d_out.data_ptr() != recording.d_hidden.data_ptr():
            load_rows(recording.d_hidden, d_out)
        # The buffer that is written next may hold the gradient of an earlier micro-batch.
        for parameter, gradient in recording.gradients:
            if parameter.grad is not None and parameter.grad.data_ptr() == gradient.data_ptr():
                parameter.grad = parameter.grad.clone()
        if recording.backward is None:
            self._first_backward()
        else:
            recording.backward()
        return recording.d_hidden[:, : self._num_tokens].detach() if recording.hidden.requires_grad else None

    def accumulate(self) -> None:
        """Set or add the gradients of the parameters."""
        held, added = [], []
        for parameter, gradient in self._recording.gradients:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                held.append(parameter.grad)
                added.append(gradient)
        if held:
            torch._foreach_add_(held, added)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of the trained parameters in order, None for those without a gradient."""
        shared = self._graphs.shared
        found = {
            parameter: gradient.clone() if parameter in shared else gradient.detach()
            for parameter, gradient in self._recording.gradients
        }
        return [found.get(parameter) for parameter in self._recording.trained]

    def _first_backward(self) -> None:
        """Record the backward and run it; if recording fails and that is allowed, run forward and backward eagerly."""
        recording = self._recording
        assert recording.run_forward is not None
        # The recording is the first run, so it shows which parameters have a gradient.
        found: list[tuple[torch.Tensor, torch.Tensor]] = []

        def backward() -> None:
            assert recording.graph_out is not None
            own = [(recording.hidden, recording.d_hidden)] if recording.hidden.requires_grad else []
            wanted = [*own, *recording.gradients]
            computed = torch.autograd.grad(
                recording.graph_out,
                [tensor for tensor, _ in wanted],
                grad_outputs=recording.d_hidden,
                allow_unused=True,
            )
            recording.graph_out = None
            pairs = [
                (tensor, memory, gradient)
                for (tensor, memory), gradient in zip(wanted, computed)
                if gradient is not None
            ]
            found[:] = [(tensor, memory) for tensor, memory, _ in pairs if tensor is not recording.hidden]
            with torch.no_grad():
                torch._foreach_copy_([memory for _, memory, _ in pairs], [gradient for _, _, gradient in pairs])

        try:
            if not self._graphs.has_given_up:
                recording.backward = self._graphs.record(backward, recording=recording, what="The backward of a layer")
                recording.backward()
        except SwapError as error:
            self._graphs.give_up(error)
        if recording.backward is None:
            recording.run_forward()
            backward()
        recording.gradients, recording.run_forward = found, None


class Replay(torch.autograd.Function):
    """A recorded layer; saves nothing, because its backward reads the memory of the graphs."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor | None, run: Run) -> torch.Tensor:
        """Replay the forward."""
        ctx.run = run
        return run.forward(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Replay the backward, which sets the gradients of the parameters."""
        d_hidden = ctx.run.backward(grads[0])
        ctx.run.accumulate()
        return d_hidden, None, None


class RankReplay(torch.autograd.Function):
    """A recorded layer whose gradients autograd accumulates, so that gradient hooks run."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, run: Run, *trained: torch.Tensor) -> torch.Tensor:
        """Replay the forward."""
        ctx.run = run
        return run.forward(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Replay the backward and return the gradients of the parameters."""
        d_hidden = ctx.run.backward(grads[0])
        return d_hidden, None, *ctx.run.gradients()
