"""EVA: initialise adapters from the activations of the first packs of the training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.lora import cast_adapters
from lightning_fastft.hf.lora_init import ADAPTER
from lightning_fastft.packing.document import IGNORED_LABEL, Document

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

# The SVD converges within a few packs; then the rest is not read.
MOST_PACKS = 32


def initialise_eva(
    model: PeftModel,
    packs: Sequence[Sequence[Document]],
    *,
    adapter_dtype: torch.dtype,
    broadcast: Callable[[Any], Any],
) -> None:
    """Set A of each adapter to the main directions of its inputs, and spread the ranks over the layers, as PEFT does.

    The configuration of the adapters then holds their ranks, and asks for no initialisation: adapters that are saved
    load without data. The packs must be the same on every rank.

    Raises:
        OptionError: No pack has enough trained tokens for the ranks.

    Cost:
        A forward of the decoder for each pack, and incremental SVDs of the inputs of all adapted layers.

    Source:
        EVA, arXiv 2410.07170, through peft.initialize_lora_eva_weights.
    """
    from peft import get_eva_state_dict, initialize_lora_eva_weights

    lora: LoraConfig = model.peft_config[ADAPTER]  # type: ignore[assignment]
    assert lora.eva_config is not None
    most = round(max([lora.r, *(lora.rank_pattern or {}).values()]) * lora.eva_config.rho)
    batches = [batch for batch in _batches(packs) if int((batch["labels"] != IGNORED_LABEL).sum()) >= most]
    if not batches:
        raise OptionError(
            f"EVA needs a pack with at least {most} trained tokens (rank times rho), and the first {len(packs)} have "
            "fewer. Set a smaller r or lora.eva_config.rho, or a larger max_tokens."
        )
    # The decoder without its head, whose logits of a whole pack nothing reads.
    decoder: Any = model.get_base_model().base_model

    def forward(_: Any, batch: dict[str, torch.Tensor]) -> Any:
        return decoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)

    state = get_eva_state_dict(
        model, batches, forward_fn=forward, gather_distributed_inputs=False, show_progress_bar=False
    )
    initialize_lora_eva_weights(model, eva_state_dict=broadcast(state))
    lora = model.peft_config[ADAPTER]  # type: ignore[assignment]
    lora.init_lora_weights, lora.eva_config = True, None
    cast_adapters(model, adapter_dtype)


def _batches(packs: Sequence[Sequence[Document]]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the documents of each pack as padded rows."""
    for documents in packs:
        width = max(len(document.input_ids) for document in documents)
        ids = torch.zeros(len(documents), width, dtype=torch.int64)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED_LABEL)
        for row, document in enumerate(documents):
            length = len(document.input_ids)
            ids[row, :length] = torch.as_tensor(document.input_ids)
            labels[row, :length] = torch.as_tensor(document.labels)
            mask[row, :length] = 1
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}
