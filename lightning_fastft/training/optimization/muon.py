"""MuonAdamW: Muon for the matrices of layers, and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.optimizer import ParamsT

from lightning_fastft.core.checks import check_bool, check_float, check_int
from lightning_fastft.core.errors import OptionError

_MUON_OPTIONS = ("lr", "weight_decay", "momentum", "ns_steps")
_ADAMW_OPTIONS = ("lr", "weight_decay", "betas", "eps", "foreach")
# Name of the fp32 copy of a bf16 parameter in its state, as in FusedAdamW.
_MASTER = "master"


class MuonAdamW(Optimizer):
    """Step matrices with torch.optim.Muon, and vectors, embeddings and the output layer with torch.optim.AdamW.

    A tuner names its embeddings, output layer, norms and biases. In a module of your own give them in a group with
    ``"use_muon": False``; without that, every tensor with two axes of more than one value is a matrix. One learning
    rate fits both, because an update of Muon is scaled to the size of one of AdamW (``match_rms_adamw``). Each group
    that is given becomes one for each of the two; state and files are those of the two optimizers.

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
        OptionError: A number is not allowed, or a parameter holds the matrices of several experts.

    Cost:
        4 bytes of state per fp32 value of a matrix, 8 per other value, and 4 more per value with a master. An iteration
        has three GEMMs per matrix. A step with masters holds the fp32 gradient of one parameter at a time.

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
        """Add a group of matrices and one of other parameters; one group if it says itself which it is.

        Raises:
            OptionError: A parameter holds the matrices of several experts.
        """
        given = param_group["params"]
        members = [given] if isinstance(given, torch.Tensor) else list(given)
        if "use_muon" not in param_group:
            for each in members:
                _check_shape(each)
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
            if whole := [each for each in group["params"] if not _has_master(each, group)]:
                part = _part_of(group, whole)
                # One dictionary for both, so that saves and loads are those of any optimizer.
                part.state = self.state
                part.step()
            for parameter in group["params"]:
                if parameter.grad is not None and _has_master(parameter, group):
                    self._step_master(parameter, group)
        return loss

    @torch.no_grad()
    def _step_master(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Step the fp32 copy of a bf16 parameter, and write the parameter."""
        state = self.state[parameter]
        master = state.pop(_MASTER, None)
        if master is None:
            master = parameter.detach().float()
        assert parameter.grad is not None
        master.grad = parameter.grad.float()
        part = _part_of(group, [master])
        part.state[master] = state
        part.step()
        master.grad = None
        state[_MASTER] = master
        parameter.copy_(master)

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


def _has_master(parameter: torch.Tensor, group: dict[str, Any]) -> bool:
    return bool(group["master_weights"]) and parameter.dtype is torch.bfloat16


def _part_of(group: dict[str, Any], parameters: list[torch.Tensor]) -> Optimizer:
    """Return the optimizer of parameters of one group, without state."""
    if group["use_muon"]:
        return Muon(parameters, adjust_lr_fn="match_rms_adamw", **{name: group[name] for name in _MUON_OPTIONS})
    return AdamW(parameters, **{name: group[name] for name in _ADAMW_OPTIONS})


def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and min(parameter.shape) > 1


def _check_shape(parameter: torch.Tensor) -> None:
    # A depthwise convolution has shape (C, 1, K).
    if parameter.ndim == 3 and min(parameter.shape) > 1:
        raise OptionError(
            f"MuonAdamW got a tensor of shape {tuple(parameter.shape)}: experts in one tensor, which torch's Muon does "
            "not step one by one. Train adapters (lora), or use FusedAdamW; in a module of your own, give such tensors "
            'in a group with "use_muon": False for AdamW.'
        )
