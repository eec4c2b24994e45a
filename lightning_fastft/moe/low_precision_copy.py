"""The low-precision copy of an adapter weight, of one linear layer or of a stack of experts."""

from __future__ import annotations

import torch

from lightning_fastft.kernels.expert_pack.op import exchange_ends


class LowPrecisionCopy:
    """The low-precision copy of one adapter weight, and the state of the master it was copied from.

    Args:
        master: The weight as PEFT stores it.
        dtype: Dtype of the copy.
        num_experts: Experts whose factors the weight stacks; 0 for one linear layer. The copy is contiguous with the
            expert as first axis.
        is_expert_last: Whether the expert is the fastest axis of the master, as in PEFT's second factor.
    """

    def __init__(
        self, master: torch.Tensor, dtype: torch.dtype, *, num_experts: int = 0, is_expert_last: bool = False
    ) -> None:
        self.master = master
        self.is_expert_last = is_expert_last
        self.num_experts = num_experts
        self._master_shape = master.shape
        # Whether an optimizer has written the copy with its master since the last refresh.
        self.is_written = False
        shape = self.master_view().shape
        # Allocate outside of inference mode: a copy first used in a validation may be saved for a backward later.
        with torch.inference_mode(mode=False):
            self.tensor = torch.empty(shape[::-1] if is_expert_last else shape, dtype=dtype, device=master.device)
        self.copy_master()

    def is_copy_of(self, master: torch.Tensor, dtype: torch.dtype) -> bool:
        """Return whether the copy fits this master: same object, shape, device and dtype."""
        tensor = self.tensor
        return (
            master is self.master
            and master.shape == self._master_shape
            and tensor.device == master.device
            and tensor.dtype is dtype
        )

    def is_current(self) -> bool:
        """Return whether version counter and address of the master are those of the last copy."""
        return self._version == self.master._version and self._pointer == self.master.data_ptr()

    def move(self, place: torch.Tensor) -> None:
        """Move the copy into this memory, which has its shape."""
        with torch.no_grad():
            self.tensor = place.copy_(self.tensor)

    def master_view(self) -> torch.Tensor:
        """Return the master without its graph; with experts as (E, R, columns), or (columns, R, E) if they are last."""
        master = self.master.detach()
        if self.is_expert_last:
            return master.view(master.shape[0], -1, self.num_experts)
        return master.view(self.num_experts, -1, master.shape[1]) if self.num_experts else master

    def copy_master(self) -> None:
        """Copy the master again."""
        with torch.no_grad():
            if self.is_expert_last:
                exchange_ends(self.master_view(), out=self.tensor)
            else:
                self.tensor.copy_(self.master_view())
        self.mark()

    def mark(self) -> None:
        """Record version counter and address of the master."""
        self._version = self.master._version
        self._pointer = self.master.data_ptr()
