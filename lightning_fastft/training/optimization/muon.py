"""MuonAdamW: Muon for the matrices of layers, and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from lightning_fastft.core.checks import check_bool, check_float, check_int
from lightning_fastft.core.shards import local_values

_ADAMW_OPTIONS = ("lr", "weight_decay", "betas", "eps", "foreach")
# Name of the fp32 copy of a bf16 parameter in its state, as in FusedAdamW.
_MASTER = "master"
# Of the quintic Newton-Schulz iteration of torch.optim.Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# A rank steps parameters of up to so many values together.
_MAX_VALUES = 2**26


class MuonAdamW(Optimizer):
    """Step matrices with Muon, and vectors, embeddings and the output layer with torch.optim.AdamW.

    A tuner names its embeddings, output layer, norms and biases. In a module of your own give them in a group with
    ``"use_muon": False``; without that, every tensor with two axes of more than one value is a matrix, and one with
    three holds the matrices of experts. One learning rate fits both, because an update of Muon is scaled to the size of
    one of AdamW (``match_rms_adamw``). Each group that is given becomes one for each of the two; the state is that of
    torch.optim.Muon and AdamW.

    Args:
        params: Parameters, or groups of them with options of their own.
        lr: Learning rate of both, from 0.
        weight_decay: Decoupled decay per unit of learning rate, from 0.
        momentum: Momentum of Muon (Nesterov), from 0 to 1.
        ns_steps: Newton-Schulz iterations of Muon, 1 to 99.
        betas: Decay rates of AdamW's moments, from 0 to 1.
        eps: Added to the denominator of AdamW.
        master_weights: Hold bf16 parameters in fp32 too, with moments in fp32: steps add to the master and write the
            parameter. Without it, changes below the last bit of a bf16 weight are lost.

    Raises:
        OptionError: A number is not allowed.

    Cost:
        4 bytes of state per fp32 value of a matrix, 8 per other value, and 4 more per value with a master. An iteration
        has three GEMMs per matrix, in bf16, for all matrices of one shape at once. A step works on a parameter, or on
        2**26 values, at a time: 18 bytes for each of them, with masters 22. Matrices that FSDP2 cuts are exchanged
        between ranks twice in a step, 2 bytes per value, and each rank iterates on its share of them.

    Source:
        Muon is Scalable for LLM Training, arXiv 2502.16982; torch.optim.Muon, torch.optim.AdamW.

    Example:
        >>> weight, bias = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(4))
        >>> [group["use_muon"] for group in MuonAdamW([weight, bias]).param_groups]
        [True, False]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        master_weights: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            check_float(name, value, low=0.0)
        for name, value in (("momentum", momentum), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            check_float(name, value, low=0.0, high=1.0)
        check_int("ns_steps", ns_steps, low=1, high=99)
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_steps": ns_steps, "betas": betas,
            "eps": eps, "foreach": None, "master_weights": check_bool("master_weights", master_weights),
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices and one of other parameters; one group if it says itself which it is."""
        given = param_group["params"]
        members = [given] if isinstance(given, torch.Tensor) else list(given)
        if "use_muon" not in param_group:
            kinds = {use_muon: [each for each in members if _is_matrix(each) is use_muon] for use_muon in (True, False)}
        else:
            kinds = {bool(param_group["use_muon"]): members}
        for use_muon, chosen in kinds.items():
            if chosen or len(kinds) == 1:
                super().add_param_group({**param_group, "params": chosen, "use_muon": use_muon})

    def use_adamw(self, parameters: Collection[torch.Tensor]) -> None:
        """Let AdamW step those of the parameters that Muon would; before the first step and before a scheduler."""
        moved, groups = set(parameters), self.param_groups
        self.param_groups = []
        for group in groups:
            kinds: dict[bool, list[torch.Tensor]] = {True: [], False: []}
            for parameter in group["params"]:
                kinds[group["use_muon"] and parameter not in moved].append(parameter)
            for use_muon, chosen in kinds.items():
                if chosen:
                    super().add_param_group({**group, "params": chosen, "use_muon": use_muon})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one step and return the result of the closure, which is called first, with gradients enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _parts_of(group):
                self._step_part(parameters, group)
        return loss

    @torch.no_grad()
    def _step_part(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Step parameters that have gradients; those with a master through it."""
        states = [self.state[parameter] for parameter in parameters]
        weights, gradients = [], []
        for parameter, state in zip(parameters, states):
            assert parameter.grad is not None
            has_master = group["master_weights"] and parameter.dtype is torch.bfloat16
            master = state.get(_MASTER) if has_master else parameter
            weights.append(parameter.detach().float() if master is None else master)
            gradients.append(parameter.grad.float() if has_master else parameter.grad)
        (_step_muon if group["use_muon"] else _step_adamw)(weights, gradients, states, group)
        for parameter, state, weight in zip(parameters, states, weights):
            if weight is not parameter:
                state[_MASTER] = weight
                parameter.copy_(weight)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, in its dtypes: PyTorch would cast masters to the dtype of the parameter."""
        super().load_state_dict(state_dict)
        numbers, parameters = (
            itertools.chain.from_iterable(group["params"] for group in groups)
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for number, parameter in zip(numbers, parameters):
            given = state_dict["state"].get(number, {})
            if _MASTER in given:
                # AdamW counts its steps on the host.
                self.state[parameter] = {
                    name: value.to(parameter.device if value.ndim else value.device, copy=True)
                    for name, value in given.items()
                }


def _parts_of(group: dict[str, Any]) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters with gradients that are stepped together: of one shape, as many for each rank as fit."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        if parameter.grad is not None:
            placement = (getattr(parameter, name, None) for name in ("device_mesh", "placements"))
            alike.setdefault((parameter.shape, parameter.device, *placement), []).append(parameter)
    for members in alike.values():
        size = _num_shards(members[0]) * max(1, _MAX_VALUES // members[0].numel())
        for start in range(0, len(members), size):
            yield members[start : start + size]


def _num_shards(parameter: torch.Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    mesh, placements = parameter.device_mesh, parameter.placements
    return math.prod(mesh.size(axis) for axis, placement in enumerate(placements) if isinstance(placement, Shard))


def _step_adamw(
    weights: list[torch.Tensor], gradients: list[torch.Tensor], states: list[dict[str, Any]], group: dict[str, Any]
) -> None:
    part = AdamW(weights, **{name: group[name] for name in _ADAMW_OPTIONS})
    held = [weight.grad for weight in weights]
    for weight, gradient, state in zip(weights, gradients, states):
        weight.grad, part.state[weight] = gradient, state
    part.step()
    for weight, own in zip(weights, held):
        weight.grad = own


def _step_muon(
    weights: list[torch.Tensor], gradients: list[torch.Tensor], states: list[dict[str, Any]], group: dict[str, Any]
) -> None:
    """Step matrices of one shape as torch.optim.Muon does with ``match_rms_adamw``; shards in place."""
    for weight, state in zip(weights, states):
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
    momenta = [local_values(state["momentum_buffer"]) for state in states]
    torch._foreach_lerp_(momenta, list(map(local_values, gradients)), 1 - group["momentum"])
    updates = torch._foreach_lerp(list(map(local_values, gradients)), momenta, group["momentum"])
    update = torch.stack([each.bfloat16() for each in updates])
    directions = _orthogonalise(update, weights[0], num_steps=group["ns_steps"])
    parts = list(map(local_values, weights))
    torch._foreach_mul_(parts, 1 - group["lr"] * group["weight_decay"])
    rate = group["lr"] * 0.2 * math.sqrt(max(weights[0].shape[-2:]))
    torch._foreach_add_(parts, list(directions.to(parts[0].dtype).unbind()), alpha=-rate)


def _orthogonalise(update: torch.Tensor, weight: torch.Tensor, *, num_steps: int) -> torch.Tensor:
    """Return the orthogonalised matrices of a stack of updates, each of the shape and placement of the weight.

    Every rank iterates on whole matrices: those that are cut are exchanged for a share of the stack, and back.
    """
    if not isinstance(weight, DTensor):
        return _iterate(update.flatten(0, -3), num_steps).view_as(update)
    shape = torch.Size((len(update), *weight.shape))
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    cut = [Shard(each.dim + 1) if isinstance(each, Shard) else each for each in weight.placements]
    whole = [Shard(0) if isinstance(each, Shard) and each.dim >= len(shape) - 2 else each for each in cut]
    place = functools.partial(DTensor.from_local, device_mesh=weight.device_mesh, shape=shape, stride=stride)
    stack = place(update, placements=cut).redistribute(placements=whole).to_local()
    direction = _iterate(stack.flatten(0, -3), num_steps).view_as(stack)
    return place(direction, placements=whole).redistribute(placements=cut).to_local()


def _iterate(matrix_BMN: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return the matrices with singular values near 1 (Newton-Schulz), as torch.optim.Muon computes them one by one.

    Args:
        matrix_BMN: Shape (B, M, N), bf16.
        num_steps: Iterations.
    """
    is_tall = matrix_BMN.shape[1] > matrix_BMN.shape[2]
    x = matrix_BMN.mT if is_tall else matrix_BMN
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=_COEFFICIENTS[1], alpha=_COEFFICIENTS[2])
        x = torch.baddbmm(x, gram, x, beta=_COEFFICIENTS[0])
    return (x.mT if is_tall else x).contiguous()


def _is_matrix(parameter: torch.Tensor) -> bool:
    # Experts are in one tensor of three axes. A depthwise convolution has shape (C, 1, K).
    return parameter.ndim in (2, 3) and min(parameter.shape) > 1
