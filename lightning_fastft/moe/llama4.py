"""Llama 4's MoE layer on routed rows only; transformers runs every expert on every token.

Axes: T tokens, K experts per token, N = T * K routed slots, E experts, D model width.
"""

from __future__ import annotations

import torch
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from lightning_fastft.moe.interface import run_slots


class RoutedLlama4Experts(Llama4TextExperts):
    """Experts of a Llama 4 layer, one expert per row; it is called as a module, so that adapters around it apply."""

    def forward(self, x_ND: torch.Tensor, expert_N: torch.Tensor) -> torch.Tensor:
        """Return the output of the expert of each row.

        The rows, shape (N, D), are multiplied by their routing weights already.

        Returns:
            Shape, dtype and device of x_ND.
        """
        return run_slots(self, x_ND, expert_N)


class RoutedLlama4Moe(Llama4TextMoe):
    """A Llama 4 MoE layer with the results of transformers, without the products of zeros.

    In transformers an expert that is not chosen gets zeros and returns zeros with a zero gradient, so skipping it is
    exact. Llama 4 multiplies the input of an expert, not its output, by the routing weight.
    """

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output of shape (T, D) and the router's logits of shape (T, E), like transformers.

        Cost:
            The experts compute N rows instead of E * T; no host sync.
        """
        x_TD = hidden_states.reshape(-1, self.hidden_dim)
        score_TE, logit_TE = self.router(x_TD)
        # The same top-k as the router; sorted, because transformers adds the experts in the order of their ids.
        expert_TK = torch.topk(logit_TE, self.top_k, dim=1).indices.sort(dim=1).values
        x_TKD = x_TD[:, None, :] * score_TE.gather(1, expert_TK)[..., None]
        y_ND = self.experts(x_TKD.flatten(0, 1), expert_TK.reshape(-1))
        return self.shared_expert(x_TD) + y_ND.view(x_TKD.shape).sum(dim=1), logit_TE
