"""FusedAdamW: AdamW that clips, steps and writes low-precision copies of all parameters in one pass over memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from lightning_fastft.core.checks import check_bool, check_choice, check_float, check_int
from lightning_fastft.core.errors import OptionError
from lightning_fastft.kernels.adamw_step.op import SkipFlag, adamw_step, grad_norm
from lightning_fastft.training.optimization.adamw_held import HeldState, Pairs
from lightning_fastft.training.optimization.adamw_parts import Part, mark_of, naming_the_alternative, read_options
from lightning_fastft.training.optimization.adamw_shards import Groups, join_norms


class FusedAdamW(HeldState):
    """AdamW of fp32 and bf16 parameters on one device, in one pass over memory per parameter group.

    Parameters are whole, or sharded over ranks (DTensor, as FSDP2 makes them): each rank steps its shards, clips by the
    norm over all ranks, and has its share of the state, whose files are loaded by any number of ranks.

    State, its names and its files are those of torch.optim.AdamW, and each loads the other's; moments are fp32, also
    those of bf16 parameters, or 8 bits where asked for, in a state that no other optimizer loads. In fp32 on a CPU the
    weights are bit-equal to torch's; on CUDA they have one rounding less. A parameter without gradient is left alone,
    and the step is not counted for it. As in torch's fused optimizers, a tensor in ``found_inf`` (shape (), fp32, on
    the device) that is not 0 makes a step change nothing: no weight, moment, low-precision copy or count. While it is
    set, ``state[...]["step"]`` counts skipped steps too, until ``state_dict`` is asked.

    Args:
        params: Parameters, or groups of them with options of their own. Plain contiguous tensors, or DTensors of such
            shards; fp32 or bf16; all that get gradients on one device.
        lr: Learning rate from 0, a number that schedulers may change between steps; or a tensor of shape () in fp32 on
            the device of the parameters.
        betas: Shares of the old moments of gradients and of their squares, in [0, 1).
        eps: Added to the denominator, from 0.
        weight_decay: Decoupled decay per unit of learning rate, from 0.
        master_weights: Hold bf16 parameters in fp32 too: steps add to the master, ``state[...]["master"]``, and write
            the parameter as its rounded value, so that changes too small for bf16 add up. Values that
            other code has written since the last step replace the master, unless they were written through
            ``param.data``, which changes no version counter.
        optim_bits: 32, or 8 for moments in codes of 8 bits, those of bitsandbytes.optim.AdamW8bit: blocks of 256
            values and the largest magnitude of each. Parameters of fewer than 4096 values keep fp32, and so do sharded
            ones whose rows are not a multiple of 256 values, because their shards would cut blocks. A gradient that is
            not finite spoils the moments of its block: guard the steps.
        rounding: "nearest", or "stochastic" for bf16 parameters without master: a step makes each weight one of the two
            neighbours of its new value, the nearer one more often, so that changes too small for bf16 add up on
            average. Random numbers depend on rounding_seed, the step, the number of the parameter and the place of the
            value alone: a resumed run, and one on another number of ranks, has the same.
        rounding_seed: From 0 to 2^63 - 1.
        offload: Share of the moments, from 0 to 1, that stay in pinned host memory; those of the first parameters. A
            step copies them through three slots of 128 MiB on the device, on two copy streams. Weights, counts, norm
            and files are those of moments on the device, for every share. Parameters of fewer than 4096 values keep
            theirs on the device; sharded ones are refused.

    Raises:
        HostMemoryError: At the first step, the host has no memory for the moments.
        OptionError: A number is not allowed, or a parameter or gradient is none of the above; torch.optim.AdamW takes
            those.

    Cost:
        Per step and group one launch per combination of dtypes: 28 bytes read and written per fp32 parameter (16 with
        moments in 8 bits), 2 more for a low-precision copy; clipping reads gradients once more, and of sharded ones
        all-reduces one number. No host synchronisation. 8 bytes of moments per parameter (2.03 in 8 bits), and 4 of a
        master, from its first step on. Moments on the host take no device memory, and cross PCIe once each way per
        step: 1.3 s for 32B in 8 bits at 50 GB/s. Tables of addresses are kept, and made anew where the parameters that
        have gradients are others than in the step before.

    Source:
        AdamW, arXiv 1711.05101; defaults of torch.optim.AdamW. Moments in 8 bits, arXiv 2110.02861. Stochastic rounding
        of weights, arXiv 2010.06192.

    Example:
        >>> param = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = FusedAdamW([param], lr=0.1, weight_decay=0.0)
        >>> param.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.clip_next(1.0)
        tensor(5.)
        >>> optimizer.step()
        >>> param.data
        tensor([ 0.9000, -2.1000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_weights: bool = False,
        optim_bits: Literal[8, 32] = 32,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        rounding_seed: int = 0,
        offload: float = 0.0,
    ) -> None:
        self.master_weights = check_bool("master_weights", master_weights)
        self.optim_bits = check_choice("optim_bits", optim_bits, (8, 32))
        self.rounding = check_choice("rounding", rounding, ("nearest", "stochastic"))
        self.rounding_seed = check_int("rounding_seed", rounding_seed, low=0, high=2**63 - 1)
        self.offload = check_float("offload", offload, low=0.0, high=1.0)
        if master_weights and rounding == "stochastic":
            raise OptionError(
                "rounding='stochastic' is for bf16 weights without masters, and master_weights=True was given. Remove "
                "one of them."
            )
        self._forget()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _forget(self) -> None:
        super()._forget()
        # Of a clipping that no step has taken.
        self._scale: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None

    def attach_copies(self, pairs: Callable[[], Pairs], on_written: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Have each step write low-precision copies of parameters in the same pass.

        Args:
            pairs: Returns (parameter, copy) at each step. Copies have shape, layout and device of their parameters;
                those that are not bf16 or fp16, that belong to a parameter without gradient or of another optimizer,
                and second copies of one parameter are not written.
            on_written: Called behind each step with the copies that are now the rounded parameters.

        Example:
            >>> param, copy = torch.nn.Parameter(torch.ones(1)), torch.zeros(1, dtype=torch.bfloat16)
            >>> optimizer = FusedAdamW([param], lr=0.5, weight_decay=0.0)
            >>> optimizer.attach_copies(lambda: [(param, copy)], on_written=lambda copies: None)
            >>> param.grad = torch.ones(1)
            >>> optimizer.step()
            >>> copy
            tensor([0.5000], dtype=torch.bfloat16)
        """
        self._pairs, self._on_written = pairs, on_written

    def attach_guard(self, judge: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Ask at each step whether it may be made.

        Args:
            judge: Called behind the closure with the norm of all gradients, shape (), fp32; returns ``found_inf``. Norm
                and flag stay on the device.

        Cost:
            None where the step clips, whose norm is taken; else reads each gradient once more.

        Example:
            >>> param = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = FusedAdamW([param], lr=0.5)
            >>> optimizer.attach_guard(lambda norm: (~torch.isfinite(norm)).float())
            >>> param.grad = torch.tensor([float("nan")])
            >>> optimizer.step()
            >>> param.data, int(optimizer.state_dict()["state"][0]["step"])
            (tensor([1.]), 0)
        """
        self._judge = judge

    def detach_guard(self) -> None:
        """Make every step from here on; a second call does nothing."""
        self._judge = self.found_inf = None

    def release(self) -> None:
        """Let go of everything but parameters and state: copies, a guard, tables and a clipping that no step has taken.

        A later step makes tables anew.

        Cost:
            One host sync where steps were guarded, for their count, or where moments are on the host.
        """
        self._pairs = self._on_written = None
        self.detach_guard()
        self._settle()
        if self._host is not None:
            self._host.release()
        self._forget()

    @torch.no_grad()
    def clip_next(self, max_norm: float) -> torch.Tensor:
        """Return the norm of all gradients, and let the next step take them times min(1, max_norm / (norm + 1e-6)).

        The numbers of torch.nn.utils.clip_grad_norm_, in fp32 for gradients of any dtype; the gradients stay as they
        are. Of two calls the last one counts, and ``zero_grad`` drops it together with the gradients that it was made
        from.

        Args:
            max_norm: Largest L2 norm of all gradients together, from 0.

        Returns:
            Norm before clipping, over all ranks. Shape (), fp32, on the device of the parameters.

        Raises:
            OptionError: max_norm is out of range, or a gradient cannot be stepped.

        Cost:
            Reads each gradient once; no host sync.
        """
        check_float("max_norm", max_norm, low=0.0)
        self._norm = norm = self.gradient_norm()
        self._scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of all gradients, shape (), fp32, on the device of the parameters.

        Raises:
            OptionError: A gradient cannot be stepped.

        Cost:
            Reads each gradient once; one all-reduce of one number if they are sharded, by every rank; no host sync.
        """
        with naming_the_alternative():
            return self._norm_of(self._find_parts())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and forget a clipping that was meant for them."""
        self._scale = self._norm = None
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one step and return the result of the closure.

        Args:
            closure: Called first, with gradients enabled; it may call ``clip_next``.

        Raises:
            OptionError: A parameter or gradient cannot be stepped, or a number of a group is not allowed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, norm, self._scale, self._norm = self._scale, self._norm, None, None
        written: list[torch.Tensor] = []
        with torch.no_grad(), naming_the_alternative():
            if self._judge is None and self.found_inf is None:
                self._settle()
            parts = self._find_parts(has_clipped=norm is not None)
            # Until the step is complete, so that a step that fails keeps nothing.
            kept, self._kept = self._kept, None
            if self._judge is not None:
                self.found_inf = self._judge(self._norm_of(parts) if norm is None else norm)
            for part in parts:
                self._step_part(part, scale=scale)
                # Of a row with a master, the copy is the parameter itself.
                written += [row.copy for row in part.table.rows if row.copy is not None and row.copy is not row.owner]
                if self.master_weights:
                    self._versions.update((row.owner, mark_of(row.owner)) for row in part.table.rows)
            if kept is not None:
                done = [part._replace(num_done=part.num_done + 1) for part in parts]
                self._kept = kept._replace(parts=done, versions=self._read_versions(done))
        # A skipped step leaves masters and copies as they were: still each the other's rounded value.
        if self._on_written is not None:
            self._on_written(written)
        return loss

    def _step_part(self, part: Part, *, scale: torch.Tensor | None) -> None:
        """Step the parameters of one part, and count the step; a guarded one is counted as skipped on the device."""
        skip = None
        if self.found_inf is not None:
            num_skipped = self._num_skipped.get(part.table.rows[0].owner)
            if num_skipped is None:
                num_skipped = torch.zeros((), dtype=torch.float64, device=part.table.device)
            skip = SkipFlag(self.found_inf, num_skipped)
        seed = self.rounding_seed if self.rounding == "stochastic" else None
        run = functools.partial(adamw_step, options=read_options(part, rounding_seed=seed), scale=scale, skip=skip)
        run(part.table)
        for piece in part.pieces:
            assert self._host is not None
            self._host.step(piece, run)
        part.steps.add_(1.0)
        if skip is not None:
            # A new tensor: other parameters, and a reader on another stream, may still use the old one.
            owners = [row.owner for row in part.table.rows]
            self._num_skipped.update(dict.fromkeys(owners, skip.num_skipped + (skip.found_inf != 0)))

    def _norm_of(self, parts: Sequence[Part]) -> torch.Tensor:
        params = self._params()
        # A rank without gradients takes part in what the others reduce.
        norms: dict[Groups, list[torch.Tensor]] = {self._groups_of(param): [] for param in params}
        for part in parts:
            norms[part.shard_groups].append(grad_norm(part.table))
        return join_norms(norms, device=params[0].device if params else None)
