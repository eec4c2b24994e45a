"""RewardTuner: a reward model from pairs, scores or labelled steps, on packs in which a prompt is computed once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from lightning_fastft.core.checks import check_choice, check_float, refuse_unread
from lightning_fastft.core.errors import DataError, UnsupportedModelError, describe_mismatch
from lightning_fastft.core.files import edited_json
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.needs import DataNeeds, LossUnit
from lightning_fastft.training.losses import reward_pair_loss
from lightning_fastft.training.model.construction import find_base
from lightning_fastft.training.tuner import Tuner

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PretrainedConfig, PreTrainedModel

    from lightning_fastft.patches.lazy_logits import LazyLogits

HEAD = "score"
# The head in a file of adapters, and the modules that PEFT adds to modules_to_save for a sequence or token classifier.
_HEAD_KEY = f"base_model.model.{HEAD}"
_HEADS_OF_PEFT = ("classifier", HEAD)
FORMATS = {"pairwise": "preference", "scalar": "scored", "stepwise": "stepwise"}
LARGEST_WEIGHT = 1e3


class RewardTuner(Tuner):
    """Train a reward model: a causal language model with a head that scores completions, or the steps of an answer.

    ``save_pretrained`` writes what ``AutoModelForSequenceClassification`` (and PEFT on it) reads; with "stepwise" what
    ``AutoModelForTokenClassification`` reads. The head is trained and saved whole, with or without
    ``lora.modules_to_save: [score]``; ``adapter`` continues it with the adapters of a reward model.

    Args:
        model: As in ``FineTuner``; a causal language model, whose language head is not used.
        loss: "pairwise": the chosen completion of a pair scores higher, by the row's margin if it has one; "scalar":
            the squared distance to the row's score; "stepwise": the binary cross-entropy of each step's label, from 0
            to 1 (process rewards).
        read: Hidden state that is scored: that of the "last" token of a completion, as in transformers' classifiers and
            TRL (also if a chat template wrote it behind the answer), or the "mean" of the scores of its trained tokens.
            A step has one, its last.
        center_weight: Weight of the squared sum of a pair's scores, which keeps scores near 0; for "pairwise".
        options: Options of ``Tuner``.

    Raises:
        OptionError: A value is not allowed, or two options do not fit.
        UnsupportedModelError: The model is a classifier, which has a head already.

    Source:
        Pairs: Bradley and Terry (1952), with the margin of Llama 2, arXiv 2307.09288; center_weight: arXiv 2312.09244;
        process rewards: arXiv 2305.20050.

    Example:
        >>> config = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
        >>> sorted(RewardTuner(config, init="random", lora={"r": 4}).data_needs.formats)
        ['preference']
    """

    def __init__(
        self,
        model: str | dict[str, Any] | PretrainedConfig | PreTrainedModel,
        *,
        loss: Literal["pairwise", "scalar", "stepwise"] = "pairwise",
        read: Literal["last", "mean"] = "last",
        center_weight: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        if self.model is not None:
            _refuse_classifier(type(find_base(self.model)).__name__)
        self.lora = _without_heads(self.lora)
        self.loss = check_choice("loss", loss, tuple(FORMATS))
        self.read = check_choice("read", read, ("last", "mean"))
        self.center_weight = check_float("center_weight", center_weight, low=0.0, high=LARGEST_WEIGHT)
        refuse_unread("center_weight", center_weight, default=0.0, is_read=loss == "pairwise", reader="loss='pairwise'")
        refuse_unread("read", read, default="last", is_read=loss != "stepwise", reader="a loss of whole completions")
        self.save_hyperparameters({"loss": loss, "read": read, "center_weight": center_weight})
        # After the adapters, none of which is to be on the head.
        self.register_transform("reward head", self._add_head, stage="after_adapters")

    @property
    def data_needs(self) -> DataNeeds:
        """Pairs or completions with a score, with a mean over examples; or labelled steps, with a mean over steps."""
        loss_unit: LossUnit = "completion" if self.loss == "stepwise" else "example"
        return DataNeeds(frozenset({FORMATS[self.loss]}), loss_unit=loss_unit)

    @property
    def stop_ids(self) -> None:
        """None: a reward model scores the text of the chat template as it is."""
        return None

    def _logged(self) -> tuple[str, ...]:
        more = {"pairwise": ("accuracy", "margin"), "scalar": (), "stepwise": ("accuracy",)}
        return "loss", "score", *more[self.loss]

    def configure_model(self) -> None:
        """Build the model with its head.

        Raises:
            UnsupportedModelError: The folder or name is that of a classifier.
        """
        if self.model is None and self.source is not None:
            for name in getattr(self.source.config, "architectures", None) or ():
                _refuse_classifier(name)
        super().configure_model()

    def _add_head(self, model: Any) -> None:
        """Give a causal language model the head of transformers' sequence or token classifiers, equal on every rank.

        It is that of the folder ``adapter`` if this has one.
        """
        model = find_base(model)
        config = model.config.get_text_config(decoder=True)
        # A model that is sharded while it is filled is on the meta device, and what fills it does not know the head.
        device = "cpu" if model.device.type == "meta" else model.device
        # Token classifiers have a bias, sequence classifiers have none.
        has_bias = self.loss == "stepwise"
        dtype = self.adapter_dtype if self.has_adapters else model.dtype
        head = nn.Linear(config.hidden_size, 1, bias=has_bias, device=device, dtype=dtype)
        draws = torch.Generator().manual_seed(self._seed % 2**63)
        initial = torch.empty(head.weight.shape).normal_(
            std=getattr(config, "initializer_range", 0.02), generator=draws
        )
        with torch.no_grad():
            head.weight.copy_(initial)
            if has_bias:
                head.bias.zero_()
        if self._options.adapter is not None:
            _read_head(self._options.adapter, head)
        model.add_module(HEAD, head)
        # Nothing is predicted with it.
        language_head = model.get_output_embeddings()
        if language_head is not None and language_head.weight is not model.get_input_embeddings().weight:
            language_head.requires_grad_(False)

    def _find_head(self, model: Any) -> nn.Linear:
        head: nn.Linear = getattr(find_base(model), HEAD)
        return head

    def predict_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """Return the score of each completion or step, shape (C,), in the order of the pack; a step's is a logit."""
        return self._read(batch, lambda logits: self._score(logits, batch.context))

    def _step(self, batch: PackedBatch, *, prefix: str) -> torch.Tensor:
        """Return the loss of a batch; log it with the mean score, and with the share of pairs in the right order, or of
        steps on the right side of 0.

        Cost:
            No host sync of its own; the language head does not run.
        """
        context = batch.context
        completions = self._find_completions(batch)
        means: dict[str, torch.Tensor] = {}

        def objective(logits: LazyLogits) -> torch.Tensor:
            score_C = self._score(logits, context)
            means["score"] = score_C.detach().sum() / max(1, completions.num_completions)
            if self.loss == "stepwise":
                loss_C = binary_cross_entropy_with_logits(score_C, completions.score_C, reduction="none")
                is_right_C = (score_C > 0) == (completions.score_C >= 0.5)
                means["accuracy"] = is_right_C.float().sum() / divisor
            elif self.loss == "scalar":
                loss_C = (score_C - completions.score_C).square()
            else:
                loss_C = self._compare(score_C, completions, means=means)
            means["loss"] = loss_C.detach().sum() / divisor
            return loss_C.sum() / context.num_items

        count = completions.num_completions if self.loss == "stepwise" else completions.num_examples
        divisor = max(1, count)
        loss = self._minimise(batch, objective)
        self._log_means(means, prefix=prefix, count=count, shown=("loss", "accuracy"))
        return loss

    def _compare(
        self, score_C: torch.Tensor, completions: Completions, *, means: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the loss of each pair; fill means."""
        if any(count != 2 for count in completions.completions_per_example):
            raise DataError(
                "loss='pairwise' compares pairs, and an example has another number of completions: give rows with "
                "chosen and rejected, or loss='scalar' for rows with a score."
            )
        chosen_G, rejected_G = score_C.view(-1, 2).unbind(1)
        # Rows hold their margin as the difference of the scores.
        margin_G = completions.score_C.view(-1, 2)[:, 0] - completions.score_C.view(-1, 2)[:, 1]
        divisor = max(1, completions.num_examples)
        means["accuracy"] = (chosen_G > rejected_G).float().sum() / divisor
        means["margin"] = (chosen_G - rejected_G).detach().sum() / divisor
        loss_G = reward_pair_loss(chosen_G, rejected_G, margin_G=margin_G)
        return loss_G + self.center_weight * (chosen_G + rejected_G).square() if self.center_weight else loss_G

    def _score(self, logits: LazyLogits, context: BatchContext) -> torch.Tensor:
        """Return the score of each completion or step, shape (C,), fp32."""
        completions = context.completions
        assert completions is not None
        head, hidden_TD = self._find_head(self.model), logits.hidden.reshape(-1, logits.hidden.shape[-1])
        # A labelled row is one before its token, whose hidden state has seen it.
        is_last = self.read == "last"
        place_R = completions.last_token_C if is_last else context.labelled_row_R[: completions.num_rows] + 1
        score_R = linear(hidden_TD.index_select(0, place_R).to(head.weight.dtype), head.weight, head.bias)[:, 0].float()
        return score_R if is_last else completions.mean(score_R)

    def save_pretrained(self, folder: str) -> None:
        """Write a classifier with one label: adapters with their head, or a whole model; and the tokenizer.

        Args:
            folder: As in ``Tuner.save_pretrained``. A whole model is read by
                ``AutoModelForSequenceClassification.from_pretrained`` (``AutoModelForTokenClassification`` with
                "stepwise"), adapters by PEFT on a base that was read so with ``num_labels=1``.
        """
        super().save_pretrained(folder)

    def _finish_files(self, part: Path) -> None:
        """Add the head to adapters, and name the classifier of a whole model."""
        kind, task_type = ("Token", "TOKEN_CLS") if self.loss == "stepwise" else ("Sequence", "SEQ_CLS")
        if hasattr(self.model, "peft_config"):
            _add_head_to_adapters(part, self._find_head(self.model), task_type=task_type)
        else:
            _rename_architecture(part, kind=kind)
        if self.loss != "stepwise":
            self._keep_last_token(part)

    def _keep_last_token(self, folder: Path) -> None:
        """Let a saved classifier, which reads the last token that is not padding, read the one that was trained; warn
        where it does not.
        """
        if self.read == "mean":
            rank_zero_warn(
                "read='mean' is not saved: transformers' classifiers score the last token alone. Take scores from "
                "trainer.predict, or train with read='last'."
            )
            return
        end, pad = (getattr(self.tokenizer, name, None) for name in ("eos_token_id", "pad_token_id"))
        own = self.model.config.get_text_config(decoder=True).pad_token_id
        used = pad if own is None else own
        if used is None or end is None:
            return
        if used == end:
            rank_zero_warn(
                f"The tokenizer pads with its end-of-sequence token ({end}), and transformers' classifiers score the "
                "last token that is no padding: the one before the end. Set model.config.pad_token_id to another token "
                "and pad with it, or to None and score one text at a time."
            )
        if not hasattr(self.model, "peft_config"):
            # Classifiers of transformers read the padding from the configuration of the text model.
            with edited_json(folder / "config.json") as config:
                (config.get("text_config") or config)["pad_token_id"] = None if used == end else used


def _refuse_classifier(name: str) -> None:
    """Refuse a model class whose own head would be dropped."""
    if name.endswith("Classification"):
        raise UnsupportedModelError(
            f"{name} has a head, and RewardTuner adds its own to a causal language model. Give the base that the "
            "classifier was made from, loaded with AutoModelForCausalLM. To go on with a run of RewardTuner, give its "
            "checkpoint as ckpt_path."
        )


def _without_heads(lora: LoraConfig | None) -> LoraConfig | None:
    """Return a LoRA configuration without the head, which is trained and saved whole in any case."""
    if lora is not None and lora.modules_to_save:
        lora = copy.copy(lora)
        lora.modules_to_save = [name for name in lora.modules_to_save if name not in _HEADS_OF_PEFT] or None
    return lora


def _read_head(folder: str, head: nn.Linear) -> None:
    """Read the head from a folder of adapters that has one.

    Raises:
        DataError: It has other weights.
    """
    from safetensors.torch import load_file

    from lightning_fastft.hf.read_back import ADAPTER_WEIGHTS

    state = load_file(Path(folder) / ADAPTER_WEIGHTS)
    held = {name.rpartition(".")[2]: value for name, value in state.items() if name.startswith(f"{_HEAD_KEY}.")}
    try:
        if held:
            head.load_state_dict(held)
    except RuntimeError as error:
        raise DataError(
            f"The reward head in {folder} does not fit: {describe_mismatch(error) or error}. Continue adapters with "
            "the loss that they were trained with: only the head of 'stepwise' has a bias."
        ) from error


def _add_head_to_adapters(folder: Path, head: nn.Linear, *, task_type: str) -> None:
    """Write the head into a folder of adapters, as PEFT writes a module that it saves whole."""
    from safetensors.torch import load_file, save_file

    from lightning_fastft.hf.export import share_weights
    from lightning_fastft.hf.read_back import ADAPTER_WEIGHTS

    file = folder / ADAPTER_WEIGHTS
    held = {f"{_HEAD_KEY}.{name}": value.cpu().contiguous() for name, value in head.state_dict().items()}
    save_file({**load_file(file), **held}, file, metadata={"format": "pt"})
    share_weights(folder)
    with edited_json(folder / "adapter_config.json") as config:
        config["task_type"] = task_type
        config["modules_to_save"] = sorted({*(config.get("modules_to_save") or ()), HEAD})


def _rename_architecture(folder: Path, *, kind: str) -> None:
    """Let the configuration of a whole model name the sequence or token classifier of its family."""
    with edited_json(folder / "config.json") as config:
        config["architectures"] = [
            name.replace("ForCausalLM", f"For{kind}Classification") for name in config.get("architectures") or ()
        ]
        config["num_labels"] = 1
        config["id2label"], config["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
