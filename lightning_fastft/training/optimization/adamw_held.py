"""What FusedAdamW holds for its parameters: state that is opened, loaded and saved, and the parts that a step reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.core.shards import local_values
from lightning_fastft.kernels.adamw_step.codes import num_blocks
from lightning_fastft.kernels.adamw_step.rows import TableRow
from lightning_fastft.training.optimization.adamw_parts import Part, follow_values, make_row, make_table, mark_of
from lightning_fastft.training.optimization.adamw_shards import Groups, first_element, is_sharded, shard_groups
from lightning_fastft.training.optimization.adamw_state import (
    MASTER,
    OTHER_RULES,
    OTHER_WAYS,
    check_group,
    check_rules,
    check_state,
    copy_state,
    is_in_8_bits,
    make_state,
    state_dtypes,
)
from lightning_fastft.training.optimization.host_moments import HostMoments, Piece, choose_offloaded

# What the pass can write beside a master; an owner of other copies is not told that they were written.
COPY_DTYPES = (torch.bfloat16, torch.float16)

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class _KeptParts(NamedTuple):
    """The parts of a step, the low-precision copies and all objects that they were made from, and the versions of
    counts and of what steps write.
    """

    parts: list[Part]
    pairs: Pairs
    sources: list[object]
    versions: list[object]


class HeldState(torch.optim.Optimizer):
    """The base of FusedAdamW, which has its options and its steps: the state of parameters, and the parts of a step."""

    master_weights: bool
    optim_bits: int
    rounding: str
    offload: float
    # Neither pickled nor copied: an owner of low-precision copies, or a guard, belongs to one optimizer.
    found_inf: torch.Tensor | None = None
    _judge: Callable[[torch.Tensor], torch.Tensor] | None = None
    _pairs: Callable[[], Pairs] | None = None
    _on_written: Callable[[Sequence[torch.Tensor]], None] | None = None
    _host: HostMoments | None = None

    def _forget(self) -> None:
        self._kept: _KeptParts | None = None
        # Of parameters with a master: the version in which the last step left them.
        self._versions: dict[torch.Tensor, tuple[int, ...]] = {}
        self._groups: dict[torch.Tensor, Groups] = {}
        # Number of each parameter, and its first element in this rank, for random numbers.
        self._places: dict[torch.Tensor, tuple[int, int]] = {}
        # Guarded steps that were skipped, shape (), float64, on the device. Parameters share the tensor while they are
        # in the same guarded steps; none for parameters without guarded steps since the counts were settled.
        self._num_skipped: dict[torch.Tensor, torch.Tensor] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state and rebuild what depends on it."""
        super().__setstate__(state)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, with counts without skipped steps."""
        self._settle()
        if self._host is not None:
            self._host.synchronize()
        options = ("master_weights", "optim_bits", "rounding", "rounding_seed", "offload")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in options}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where the group has them.

        Raises:
            OptionError: As for the class; the group is not added.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except OptionError:
            self.param_groups.pop()
            raise
        self._places = {}

    def master_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return the tensor that steps add to: the fp32 master of a bf16 parameter (before its first step a copy of the
        future master), else the parameter itself.

        Example:
            >>> from lightning_fastft.training.optimizer import FusedAdamW
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
        return state[MASTER] if MASTER in state else param.detach().float()

    def state_bytes(self, param: torch.Tensor) -> int:
        """Return the device bytes of moments and master of a parameter; of a sharded one, those of this rank.

        Of moments on the host, the slots through which steps copy them count for the first parameter.
        """
        num_values = local_values(param).numel()
        host = self._host_moments()
        if host is not None and param in host:
            return host.device_bytes(param) + 4 * num_values * self._has_master(param)
        moments = (
            2 * (num_values + 4 * num_blocks(num_values))
            if is_in_8_bits(param, optim_bits=self.optim_bits)
            else 8 * num_values
        )
        return moments + 4 * num_values * self._has_master(param)

    def host_bytes(self) -> int:
        """Return the bytes of the moments on the host, which each step copies to the device and back."""
        host = self._host_moments()
        return 0 if host is None else host.host_bytes()

    def _host_moments(self) -> HostMoments | None:
        """Return what holds moments on the host; the choice of parameters is made once."""
        if self._host is None and self.offload:
            params = self._params()
            if any(map(is_sharded, params)):
                raise OptionError(
                    f"offload={self.offload} takes whole parameters, and these are sharded. Remove offload: more ranks "
                    "hold smaller shares of the moments."
                )
            chosen = choose_offloaded(params, share=self.offload)
            self._host = HostMoments(chosen, optim_bits=self.optim_bits) if chosen else None
        return self._host

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _has_master(self, param: torch.Tensor) -> bool:
        return self.master_weights and param.dtype is torch.bfloat16

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim.AdamW does, with counts that exclude skipped steps.

        Cost:
            One host sync where steps were guarded, or where moments are on the host.
        """
        self._settle()
        if self._host is not None:
            self._host.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this class or of torch.optim.AdamW; moments are copied and held in fp32.

        Raises:
            ResumeError: The state is that of another optimizer, or of AdamW with options that this one has not.
        """
        given: list[dict[str, Any]] = []

        def take(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            self._check_given(state_dict)
            given.append(state_dict)
            # PyTorch would cast moments to the dtype of the parameter, on its device.
            return {**state_dict, "state": {}}

        # Behind hooks of others, which may give another state.
        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group in self.param_groups:
            for name in (*OTHER_RULES, *OTHER_WAYS):
                group.pop(name, None)
        for number, param in self._pair_up(given[0]):
            found = given[0]["state"].get(number)
            if found:
                dtypes = state_dtypes(param, optim_bits=self.optim_bits)
                host = self._host_moments()
                if host is not None and param in host:
                    # Copied once, into the pinned memory.
                    self.state[param] = {name: found[name] for name in dtypes}
                    host.take(self.state[param], param)
                    self.state[param].update(copy_state(found, param, dtypes={}))
                else:
                    self.state[param] = copy_state(found, param, dtypes=dtypes)
                if MASTER in self.state[param]:
                    self._versions[param] = mark_of(param)

    def _pair_up(self, state_dict: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
        """Return the numbers of parameters in a state with the parameters that they stand for."""
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        return zip(numbers, self._params())

    def _check_given(self, state_dict: dict[str, Any]) -> None:
        """Refuse a state that would lose values or change their meaning."""
        for group in state_dict["param_groups"]:
            check_rules(group)
        for number, param in self._pair_up(state_dict):
            check_state(
                number,
                state_dict["state"].get(number, {}),
                param,
                names=set(state_dtypes(param, optim_bits=self.optim_bits)),
                has_masters=self.master_weights,
            )

    def _settle(self) -> None:
        """Take skipped steps out of the counts on the host; syncs with the device if there were guarded ones."""
        if not self._num_skipped:
            return
        self._kept = None
        for param, num_skipped in zip(self._num_skipped, torch.stack(list(self._num_skipped.values())).tolist()):
            if num_skipped:
                self.state[param]["step"] -= num_skipped
        self._num_skipped = {}

    def _find_parts(self, *, has_clipped: bool = False) -> list[Part]:
        """Return the parts of the next step: those of the step before if it was made from the same objects.

        A step that was clipped takes the copies that ``clip_next`` asked for. A copy made since then is not written,
        and its owner is not told that it was.
        """
        kept = self._kept
        pairs = () if self._pairs is None else kept.pairs if has_clipped and kept is not None else self._pairs()
        if kept is not None:
            sources = self._find_sources(pairs)
            if (
                len(sources) == len(kept.sources)
                and all(map(operator.is_, sources, kept.sources))
                and self._read_versions(kept.parts) == kept.versions
            ):
                return kept.parts
        parts = self._make_parts(pairs)
        self._kept = _KeptParts(parts, pairs, self._find_sources(pairs), self._read_versions(parts))
        return parts

    def _find_sources(self, pairs: Pairs) -> list[object]:
        """Return the objects that parts are made from, to be compared by identity."""
        params = self._params()
        return [
            self._judge is None and self.found_inf is None,
            *self.param_groups,
            *params,
            *map(local_values, params),
            *[param.grad is None for param in params],
            # Parameters without a gradient change nothing, and may have no state.
            *chain.from_iterable(map(dict.values, self.state.values())),
            *chain.from_iterable(pairs),
        ]

    def _read_versions(self, parts: Sequence[Part]) -> list[object]:
        """Return numbers that change when other code writes the counts of steps, or parameters that have a master."""
        versions: list[object] = [part.steps._version for part in parts]
        if self.master_weights:
            versions += [mark_of(row.owner) for part in parts for row in part.table.rows]
        return versions

    def _make_parts(self, pairs: Pairs) -> list[Part]:
        """Group the parameters that have a gradient by group, steps made and sharding, each part with its table."""
        copies: dict[int, torch.Tensor] = {}
        for master, copy in pairs:
            if copy.dtype in COPY_DTYPES:
                copies.setdefault(id(master), copy)
        parts = []
        for group in self.param_groups:
            held = [param for param in group["params"] if param.grad is not None]
            states = [self._open_state(param) for param in held]
            # Host numbers, read at once.
            counts = torch.stack([state["step"] for state in states]).tolist() if states else []
            # Counts include skipped steps, so those that are alike may still stand for other numbers of steps.
            keys = [
                (count, id(self._num_skipped.get(param)), self._groups_of(param)) for count, param in zip(counts, held)
            ]
            for key in dict.fromkeys(keys):
                chosen = [index for index, other in enumerate(keys) if other == key]
                rows, pieces = self._make_rows([(held[i], states[i], copies.get(id(held[i]))) for i in chosen])
                table = make_table(rows)
                # One addition counts a step for all of them.
                steps = torch.full((len(chosen),), key[0], dtype=torch.float32, device="cpu")
                for index, step in zip(chosen, steps):
                    states[index]["step"] = step
                parts.append(Part(group, table, int(key[0]), steps, key[2], pieces))
        if len({part.table.device for part in parts}) > 1:
            raise ShapeError(
                f"Parameters are on {sorted({str(part.table.device) for part in parts})}; one step takes those of one "
                "device."
            )
        return parts

    def _make_rows(
        self, given: Sequence[tuple[torch.Tensor, dict[str, Any], torch.Tensor | None]]
    ) -> tuple[list[TableRow], list[Piece]]:
        """Return the rows of parameters, and the pieces of those whose moments are on the host."""
        if any(param not in self._places for param, _, _ in given):
            is_stochastic = self.rounding == "stochastic"
            self._places = {
                param: (number, first_element(param) if is_stochastic and param.dtype is torch.bfloat16 else 0)
                for number, param in enumerate(self._params())
            }
        rows: list[TableRow] = []
        pieces: list[Piece] = []
        for param, state, copy in given:
            number, first = self._places[param]
            row = make_row(param, state, copy, number=number, first=first)
            if self._host is not None and param in self._host:
                row, own_pieces = self._host.split(row)
                pieces += own_pieces
            rows.append(row)
        return rows, pieces

    def _open_state(self, param: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter, made before its first step."""
        state: dict[str, Any] = self.state[param]
        host = self._host_moments()
        if host is not None and param in host:
            state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
            host.take(state, param)
        elif not state:
            state.update(make_state(param, optim_bits=self.optim_bits))
        if self._has_master(param):
            if MASTER not in state:
                state[MASTER] = param.detach().float()
            elif param in self._versions and self._versions[param] != mark_of(param):
                follow_values(state[MASTER], param)
        return state

    def _groups_of(self, param: torch.Tensor) -> Groups:
        if param not in self._groups:
            self._groups[param] = shard_groups(param)
        return self._groups[param]
