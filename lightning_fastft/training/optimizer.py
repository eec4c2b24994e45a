"""FusedAdamW: AdamW that clips, steps and writes low-precision copies of all parameters in one pass over memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch.optim.optimizer import ParamsT

from lightning_fastft.core.checks import check_bool, check_choice, check_float
from lightning_fastft.core.errors import OptionError, ResumeError, ShapeError
from lightning_fastft.kernels.adamw_step.codes import num_blocks
from lightning_fastft.kernels.adamw_step.op import SkipFlag, StepOptions, TensorTable, adamw_step, grad_norm
from lightning_fastft.kernels.adamw_step.reference import TableRow

_DTYPES = (torch.float32, torch.bfloat16)
# What the pass can write beside a master; an owner of other copies is not told that they were written.
_COPY_DTYPES = (torch.bfloat16, torch.float16)
_AVERAGES = ("exp_avg", "exp_avg_sq")
# Of moments in 8 bits: the largest magnitude of each block of 256.
_ABSMAXS = ("exp_avg_absmax", "exp_avg_sq_absmax")
# Smaller parameters keep moments in fp32, as with bitsandbytes: norms and biases, whose few numbers tell little of
# each other's size.
MIN_8BIT_SIZE = 4096
_MASTER = "master"
# Options of torch.optim.AdamW that change its numbers, and those that only choose how it computes them.
_OTHER_RULES = ("amsgrad", "maximize")
_OTHER_WAYS = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class _Cohort:
    """Parameters that were in the same guarded steps, and how many of these were skipped: a number on the device,
    shape (), float64.
    """

    def __init__(self, num_skipped: torch.Tensor, *, num_params: int) -> None:
        self.num_skipped = num_skipped
        self.num_params = num_params


class _Part(NamedTuple):
    """The parameters of one group that have a gradient and have made the same steps; with a cohort, num_done
    counts those that were skipped too.
    """

    group: dict[str, Any]
    table: TensorTable
    num_done: int
    steps: list[torch.Tensor]
    cohort: _Cohort | None


class FusedAdamW(torch.optim.Optimizer):
    """AdamW of fp32 and bf16 parameters on one device, in one pass over memory per parameter group.

    State, its names and its files are those of torch.optim.AdamW, and each loads the other's; moments are fp32, also
    those of bf16 parameters, or 8 bits where asked for, in a state that no other optimizer loads. In fp32 on a CPU the
    weights are bit-equal to torch's; on CUDA they have one rounding less. A parameter without gradient is left alone,
    and the step is not counted for it. As in torch's fused optimizers, a tensor in ``found_inf`` (shape (), fp32, on
    the device) that is not 0 makes a step change nothing: no weight, average, low-precision copy or count. While it is
    set, ``state[...]["step"]`` counts skipped steps too, until ``state_dict`` is asked.

    Args:
        params: Parameters, or groups of them with options of their own. Plain contiguous tensors; fp32 or bf16; all
            that get gradients on one device.
        lr: Learning rate from 0, a number that schedulers may change between steps; or a tensor of shape () in fp32 on
            the device of the parameters.
        betas: Shares of the old moments of gradients and of their squares, in [0, 1).
        eps: Added to the denominator, from 0.
        weight_decay: Decoupled decay per unit of learning rate, from 0.
        master_weights: Hold bf16 parameters in fp32 too: steps add to the master, ``state[...]["master"]``, and write
            the parameter as its rounded value, so that changes too small for bf16 add up. A parameter that somebody
            else has written since the last step is taken as it is then.
        optim_bits: 32, or 8 for moments in codes of 8 bits, those of bitsandbytes.optim.AdamW8bit: blocks of 256
            values and the largest magnitude of each. Parameters of fewer than 4096 values keep fp32. A gradient that is
            not finite spoils the moments of its block: guard the steps.

    Raises:
        OptionError: A number is not allowed, or a parameter or gradient is none of the above; torch.optim.AdamW takes
            those.

    Cost:
        Per step and group one launch per combination of dtypes: 28 bytes read and written per fp32 parameter (16 with
        moments in 8 bits), 2 more for a low-precision copy; clipping reads gradients once more. No host
        synchronisation. 8 bytes of moments per parameter (2.03 in 8 bits), and 4 of a master, from its first step on.
        Tables of addresses are kept, and made anew where the parameters that have gradients are others than in the step
        before.

    Source:
        AdamW, arXiv 1711.05101; defaults of torch.optim.AdamW. Averages in 8 bits, arXiv 2110.02861.

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

    # Neither pickled nor copied: an owner of low-precision copies, or a guard, belongs to one optimizer.
    found_inf: torch.Tensor | None = None
    _judge: Callable[[torch.Tensor], torch.Tensor] | None = None
    _pairs: Callable[[], Pairs] | None = None
    _on_written: Callable[[Sequence[torch.Tensor]], None] | None = None

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
    ) -> None:
        self.master_weights = check_bool("master_weights", master_weights)
        self.optim_bits = check_choice("optim_bits", optim_bits, (8, 32))
        self._forget()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state and rebuild what depends on it."""
        super().__setstate__(state)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, with counts without skipped steps."""
        self._settle()
        return {**super().__getstate__(), "master_weights": self.master_weights, "optim_bits": self.optim_bits}

    def _forget(self) -> None:
        self._tables: dict[int, TensorTable] = {}
        # Of parameters with a master: the version in which the last step left them.
        self._versions: dict[torch.Tensor, int] = {}
        self._cohorts: dict[torch.Tensor, _Cohort] = {}
        self._scale: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where the group has them.

        Raises:
            OptionError: As for the class; the group is not added.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except OptionError:
            self.param_groups.pop()
            raise

    def master_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return what steps add to: the fp32 master of a bf16 parameter, before its first step a copy of what it will
        be, else the parameter itself.

        Example:
            >>> param = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
            >>> optimizer = FusedAdamW([param], lr=1e-3, weight_decay=0.0, master_weights=True)
            >>> param.grad = torch.ones_like(param)
            >>> optimizer.step()
            >>> param.data, optimizer.master_of(param)
            (tensor([1.], dtype=torch.bfloat16), tensor([0.9990]))
        """
        if not self._has_master(param):
            return param
        state = self.state.get(param, {})
        return state[_MASTER] if _MASTER in state else param.detach().float()

    def state_bytes(self, param: torch.Tensor) -> int:
        """Return the bytes of moments and master of a parameter."""
        moments = (
            2 * (param.numel() + 4 * num_blocks(param.numel())) if self._is_in_8_bits(param) else 8 * param.numel()
        )
        return moments + 4 * param.numel() * self._has_master(param)

    def _has_master(self, param: torch.Tensor) -> bool:
        return self.master_weights and param.dtype is torch.bfloat16

    def _is_in_8_bits(self, param: torch.Tensor) -> bool:
        return self.optim_bits == 8 and param.numel() >= MIN_8BIT_SIZE

    def _state_dtypes(self, param: torch.Tensor) -> dict[str, torch.dtype]:
        """Return the names and dtypes of the state of a parameter, but for its count and master."""
        if self._is_in_8_bits(param):
            return dict.fromkeys(_AVERAGES, torch.uint8) | dict.fromkeys(_ABSMAXS, torch.float32)
        return dict.fromkeys(_AVERAGES, torch.float32)

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
            One host sync where steps were guarded, for their count.
        """
        self._pairs = self._on_written = None
        self.detach_guard()
        self._settle()
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim.AdamW does, with counts that leave skipped steps out.

        Cost:
            One host sync where steps were guarded.
        """
        self._settle()
        return super().state_dict()

    @torch.no_grad()
    def clip_next(self, max_norm: float) -> torch.Tensor:
        """Return the norm of all gradients, and let the next step take them times min(1, max_norm / (norm + 1e-6)).

        The numbers of torch.nn.utils.clip_grad_norm_, in fp32 for gradients of any dtype; the gradients stay as they
        are. Of two calls the last one counts, and ``zero_grad`` drops it together with the gradients that it was made
        from.

        Args:
            max_norm: Largest L2 norm of all gradients together, from 0.

        Returns:
            Norm before clipping. Shape (), fp32, on the device of the parameters.

        Raises:
            OptionError: max_norm is no such number, or a gradient cannot be stepped.

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
            Reads each gradient once; no host sync.
        """
        with _naming_the_alternative():
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
        with torch.no_grad(), _naming_the_alternative():
            if self._judge is None and self.found_inf is None:
                self._settle()
            parts = self._find_parts()
            if self._judge is not None:
                self.found_inf = self._judge(self._norm_of(parts) if norm is None else norm)
            for part in parts:
                self._step_part(part, scale=scale)
                # Of a row with a master, the copy is the parameter itself.
                written += [row.copy for row in part.table.rows if row.copy is not None and row.copy is not row.owner]
                if self.master_weights:
                    self._versions.update((row.owner, row.owner._version) for row in part.table.rows)
        # A skipped step leaves masters and copies as they were: still each the other's rounded value.
        if self._on_written is not None:
            self._on_written(written)
        return loss

    def _step_part(self, part: _Part, *, scale: torch.Tensor | None) -> None:
        """Step the parameters of one part, and count the step; what comes of it where it is guarded is counted on
        the device.
        """
        skip = None
        if part.cohort is not None:
            assert self.found_inf is not None
            skip = SkipFlag(self.found_inf, part.cohort.num_skipped)
        adamw_step(part.table, options=_read_options(part), scale=scale, skip=skip)
        torch._foreach_add_(part.steps, 1.0)
        if skip is not None:
            # A new tensor: one that is written in place would change what a reader on another stream still copies.
            part.cohort.num_skipped = skip.num_skipped + (skip.found_inf != 0)  # type: ignore[union-attr]

    def _norm_of(self, parts: Sequence[_Part]) -> torch.Tensor:
        norms = [grad_norm(part.table) for part in parts]
        if not norms:
            return torch.zeros(
                (), device=next((param.device for group in self.param_groups for param in group["params"]), None)
            )
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def _settle(self) -> None:
        """Take skipped steps out of the counts on the host; syncs with the device if there were guarded ones."""
        cohorts = list(dict.fromkeys(self._cohorts.values()))
        if not cohorts:
            return
        num_skipped = dict(zip(cohorts, torch.stack([cohort.num_skipped for cohort in cohorts]).tolist()))
        for param, cohort in self._cohorts.items():
            if num_skipped[cohort]:
                self.state[param]["step"] -= num_skipped[cohort]
        self._cohorts = {}

    def _find_cohort(self, params: Sequence[torch.Tensor]) -> _Cohort:
        """Return the cohort of parameters that were together so far; those that take part without its others
        leave it, with its count.
        """
        cohort = self._cohorts.get(params[0])
        if cohort is None:
            cohort = _Cohort(torch.zeros((), dtype=torch.float64, device=params[0].device), num_params=len(params))
        elif cohort.num_params != len(params):
            cohort.num_params -= len(params)
            cohort = _Cohort(cohort.num_skipped, num_params=len(params))
        self._cohorts.update(dict.fromkeys(params, cohort))
        return cohort

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this class or of torch.optim.AdamW; moments are copied and held in fp32.

        Raises:
            ResumeError: The state is that of another optimizer, or of AdamW with options that this one has not.
        """
        given: list[dict[str, Any]] = []

        def take(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            self._check_given(state_dict)
            given.append(state_dict)

        # Behind hooks of others, which may give another state.
        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group in self.param_groups:
            for name in (*_OTHER_RULES, *_OTHER_WAYS):
                group.pop(name, None)
        for number, param in self._pair_up(given[0]):
            # PyTorch has cast moments to the dtype of the parameter, and shares them with the state given where it had
            # nothing to cast.
            if given[0]["state"].get(number):
                self.state[param] = _copy_state(
                    given[0]["state"][number], param.device, dtypes=self._state_dtypes(param)
                )
                if _MASTER in self.state[param]:
                    self._versions[param] = param._version

    def _pair_up(self, state_dict: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
        """Return the numbers of parameters in a state with the parameters that they stand for."""
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        return zip(numbers, chain.from_iterable(group["params"] for group in self.param_groups))

    def _check_given(self, state_dict: dict[str, Any]) -> None:
        """Refuse a state that would lose values or change their meaning."""
        for group in state_dict["param_groups"]:
            wanted = [name for name in _OTHER_RULES if group.get(name)]
            if wanted:
                raise ResumeError(
                    f"The state is of AdamW with {', '.join(wanted)}, which FusedAdamW has not: resume with "
                    "torch.optim.AdamW."
                )
        for number, param in self._pair_up(state_dict):
            _check_state(
                number,
                state_dict["state"].get(number, {}),
                names=set(self._state_dtypes(param)),
                has_masters=self.master_weights,
            )

    def _find_parts(self) -> list[_Part]:
        """Group the parameters that have a gradient by group and steps made, each part with its table."""
        is_guarded = self._judge is not None or self.found_inf is not None
        copies: dict[int, torch.Tensor] = {}
        for master, copy in () if self._pairs is None else self._pairs():
            if copy.dtype in _COPY_DTYPES:
                copies.setdefault(id(master), copy)
        tables, self._tables = self._tables, {}
        parts = []
        for group in self.param_groups:
            held = [param for param in group["params"] if param.grad is not None]
            states = [self._open_state(param) for param in held]
            # Host numbers, read at once.
            counts = torch.stack([state["step"] for state in states]).tolist() if states else []
            # Counts include skipped steps, so those that are alike may still stand for other numbers of steps.
            keys = [(count, self._cohorts.get(param)) for count, param in zip(counts, held)]
            for key in dict.fromkeys(keys):
                chosen = [index for index, other in enumerate(keys) if other == key]
                rows = [_make_row(held[i], states[i], copies.get(id(held[i]))) for i in chosen]
                table = _find_table(tables, rows)
                self._tables[id(held[chosen[0]])] = table
                cohort = self._find_cohort([held[i] for i in chosen]) if is_guarded else None
                parts.append(_Part(group, table, int(key[0]), [states[i]["step"] for i in chosen], cohort))
        if len({part.table.device for part in parts}) > 1:
            raise ShapeError(
                f"Parameters lie on {sorted({str(part.table.device) for part in parts})}; one step takes those of one "
                "device."
            )
        return parts

    def _open_state(self, param: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter, made before its first step."""
        state: dict[str, Any] = self.state[param]
        if not state:
            # The count stays on the host, where bias corrections are computed.
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name, dtype in self._state_dtypes(param).items():
                shape = (num_blocks(param.numel()),) if name in _ABSMAXS else param.shape
                # With a largest magnitude of 0 every code means 0.
                state[name] = torch.zeros(shape, dtype=dtype, device=param.device)
        if self._has_master(param):
            if _MASTER not in state:
                state[_MASTER] = param.detach().float()
            elif self._versions.get(param, param._version) != param._version:
                state[_MASTER].copy_(param)
        return state


def is_steppable(param: torch.Tensor) -> bool:
    """Whether FusedAdamW takes a parameter: a plain, contiguous tensor in fp32 or bf16.

    Example:
        >>> is_steppable(torch.nn.Parameter(torch.ones(2))), is_steppable(torch.nn.Parameter(torch.ones(2).double()))
        (True, False)
    """
    is_plain = type(param) in (torch.Tensor, torch.nn.Parameter) and param.layout is torch.strided
    return is_plain and param.dtype in _DTYPES and param.is_contiguous()


def _make_row(param: torch.Tensor, state: dict[str, Any], copy: torch.Tensor | None) -> TableRow:
    """Return what a step writes for a parameter: with a master, the parameter is the low-precision copy."""
    param_and_copy = (state[_MASTER], param) if _MASTER in state else (param, copy)
    exp_avg, exp_avg_sq = (state[name] for name in _AVERAGES)
    return TableRow(
        param_and_copy[0], exp_avg, exp_avg_sq, param_and_copy[1], param, *(state.get(name) for name in _ABSMAXS)
    )


def _check_group(group: dict[str, Any]) -> None:
    """Refuse parameters and options that AdamW in one pass has not."""
    for index, param in enumerate(group["params"]):
        if not is_steppable(param):
            raise OptionError(
                f"params[{index}] is a {type(param).__name__} of {param.dtype} and shape {tuple(param.shape)}; "
                "FusedAdamW takes plain, contiguous "
                "tensors in fp32 or bf16. Use torch.optim.AdamW for it."
            )
    rate = group["lr"]
    if not isinstance(rate, torch.Tensor):
        check_float("lr", rate, low=0.0)
    for beta in group["betas"]:
        if check_float("betas", beta, low=0.0) >= 1.0:
            raise OptionError(f"betas must lie in [0, 1), got {group['betas']}.")
    check_float("eps", group["eps"], low=0.0)
    check_float("weight_decay", group["weight_decay"], low=0.0)
    wanted = [name for name in _OTHER_RULES if group.get(name)]
    if wanted:
        raise OptionError(f"FusedAdamW has no {', '.join(wanted)}. Use torch.optim.AdamW for it.")


def _read_options(part: _Part) -> StepOptions:
    """Return the numbers of a part's next step."""
    group, rate = part.group, part.group["lr"]
    if isinstance(rate, torch.Tensor) and rate.device.type == "cpu":
        rate = float(rate)
    beta1, beta2 = group["betas"]
    return StepOptions(
        learning_rate=rate,
        step=part.num_done + 1,
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )


def _find_table(tables: dict[int, TensorTable], rows: list[TableRow]) -> TensorTable:
    """Return the table of the step before where it holds these very tensors, else a new one."""
    table = tables.get(id(rows[0].owner))
    kept = () if table is None else table.rows
    if (
        table is not None
        and len(kept) == len(rows)
        and all(one is other for pair in zip(kept, rows) for one, other in zip(*pair))
    ):
        return table
    params, exp_avgs, exp_avg_sqs, copies, owners, *absmaxs = zip(*rows)
    return TensorTable(
        params,
        exp_avgs=exp_avgs,
        exp_avg_sqs=exp_avg_sqs,
        copies=copies,
        owners=owners,
        exp_avg_absmaxs=absmaxs[0],
        exp_avg_sq_absmaxs=absmaxs[1],
    )


@contextlib.contextmanager
def _naming_the_alternative() -> Iterator[None]:
    """Say in an error about a tensor which optimizer takes it."""
    try:
        yield
    except ShapeError as error:
        raise OptionError(f"FusedAdamW cannot step these tensors. {error} Or use torch.optim.AdamW.") from error


def _check_state(number: Any, state: dict[str, Any], *, names: set[str], has_masters: bool) -> None:
    """Refuse the state of a parameter that holds other things than its steps would write."""
    found = set(state) - {_MASTER, "step"}
    if _MASTER in state and not has_masters:
        raise ResumeError(
            f"The state of parameter {number} has an fp32 master: resume with "
            "FusedAdamW(master_weights=True), in a FineTuner "
            "master_dtype='float32'."
        )
    if state and found != names and found in ({*_AVERAGES}, {*_AVERAGES, *_ABSMAXS}):
        held, other = (8, 32) if _ABSMAXS[0] in found else (32, 8)
        raise ResumeError(
            f"The state of parameter {number} holds moments in {held} bits, and this optimizer has "
            f"optim_bits={other}: resume with "
            f"FusedAdamW(optim_bits={held})."
        )
    if state and (found != names or "step" not in state):
        raise ResumeError(
            f"The state of parameter {number} holds {sorted(state)}, AdamW's holds "
            f"{sorted(('step', *names))}: resume with the "
            "optimizer that wrote it."
        )


def _copy_state(
    state: dict[str, Any], device: torch.device, *, dtypes: dict[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Return a state of one's own: the count on the host, all else on the device of its parameter."""
    copied = {"step": torch.tensor(float(state["step"]), dtype=torch.float32)}
    for name, dtype in (dtypes | ({_MASTER: torch.float32} if _MASTER in state else {})).items():
        copied[name] = (
            state[name].detach().to(device=device, dtype=dtype, memory_format=torch.contiguous_format, copy=True)
        )
    return copied
