"""The judge: a system is timed only if its gradients of one step on a packed batch equal those of the plain arm.

Each trainable tensor is compared with the same tensor of the plain arm (the first system, Hugging Face's own loss):
cosine at least 0.999 and norm within 2 %. Gradients may be bf16 or fp32; they are compared as float64 sums of fp32
values, so that the comparison adds no rounding of its own. On the ruler's weights the errors of bf16 arithmetic (other
orders of summation, 0.4 % per rounding) stay within these limits (see ``_condition`` in building.py). A system outside
of the limits gets no row.

Modes with "+fp8" compute an approximation: a product of e4m3 numbers is off by 3.7 % of its norm, more than the limits
above allow. They have wider limits, cosine at least 0.98 and norm within 10 %, which are in the verdict and in the raw
record. Their rows have "fp8" in the mode, so they are never mixed with rows of bf16. These
limits still catch a wrong layer: a lost scale, a transposed weight or a missing product has a far lower cosine. They do
not show that training converges equally well; the curves of benchmarks/training_curves.py (``--fp8``) do.

Full fine-tuning has a gradient as large as the model. The reference keeps the dtype of the gradients, and both are
compared in place, a few million elements at a time: the host holds only the file, and the device some hundred MB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.ruler.tensors import TensorFiles, pieces, write_tensors

MIN_COSINE = 0.999
MAX_NORM_ERROR = 0.02
FP8_MIN_COSINE = 0.98
FP8_MAX_NORM_ERROR = 0.1
# PEFT wraps a stack of expert weights by the name of its module, and the second stack around the first.
_WRAPPED_STACKS = {"experts.base_layer": "experts.gate_up_proj", "experts": "experts.down_proj"}
_ADAPTER_NAME = re.compile(r"layers\.(\d+)\.([\w.]+?)\.lora_([AB])\b")
_LAYER_NAME = re.compile(r"\blayers\.(\d+\..+)$")


@dataclass(frozen=True)
class Limits:
    """Limits on the difference of a gradient from that of the plain arm.

    Args:
        min_cosine: Least cosine.
        max_norm_error: Largest relative difference of norms.
    """

    min_cosine: float = MIN_COSINE
    max_norm_error: float = MAX_NORM_ERROR


def limits_of(mode: str) -> Limits:
    """Return the limits for a mode.

    Example:
        >>> limits_of("keep+fused+fp8")
        Limits(min_cosine=0.98, max_norm_error=0.1)
    """
    return Limits(FP8_MIN_COSINE, FP8_MAX_NORM_ERROR) if "fp8" in mode.split("+") else Limits()


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Args:
        passed: Whether the system may be timed.
        reason: Why it may not; empty if passed.
        num_tensors: Tensors compared.
        worst_cosine: Lowest cosine, with its tensor's name.
        worst_norm_error: Largest relative difference of norms, with its tensor's name.
        lowest: The five tensors with the lowest cosine: name, cosine, relative norm error.
        limits: The limits that applied.
    """

    passed: bool
    reason: str
    num_tensors: int = 0
    worst_cosine: tuple[str, float] = ("", float("nan"))
    worst_norm_error: tuple[str, float] = ("", float("nan"))
    median_cosine: float = float("nan")
    lowest: tuple[tuple[str, float, float], ...] = ()
    limits: Limits = Limits()

    def describe(self) -> str:
        """Return the verdict in one line."""
        summary = (
            f"{self.num_tensors} gradients, lowest cosine {self.worst_cosine[1]:.6f} ({self.worst_cosine[0]}), "
            "largest norm difference "
        )
        summary += f"{self.worst_norm_error[1]:.2%} ({self.worst_norm_error[0]}){self._limits_text()}"
        return f"{'passed' if self.passed else 'REFUSED: ' + self.reason}; {summary}"

    def _limits_text(self) -> str:
        if self.limits == Limits():
            return ""
        return (
            f"; judged by limits of its own: cosine {self.limits.min_cosine}, norm within "
            f"{self.limits.max_norm_error:.0%}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the raw log."""
        return asdict(self)


def canonical_name(name: str, *, parameter: str | None = None) -> str | None:
    """Return "<layer>.<module>.<A|B>" for an adapter tensor, independent of wrappers; None for another tensor.

    Args:
        name: Name of the tensor.
        parameter: Name of the parameter that the wrapper of a stack of expert weights wraps; None to infer it from the
            order in which PEFT 0.21 nests wrappers.

    Example:
        >>> canonical_name("base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight")
        '3.self_attn.q_proj.A'
        >>> canonical_name("base_model.model.model.layers.3.mlp.experts.base_layer.lora_A.weight")
        '3.mlp.experts.gate_up_proj.A'
    """
    match = _ADAPTER_NAME.search(name)
    if match is None:
        return None
    parent, _, last = match[2].rpartition("experts")
    module = match[2]
    if parent and f"experts{last}" in _WRAPPED_STACKS:
        module = parent + (f"experts.{parameter}" if parameter else _WRAPPED_STACKS[f"experts{last}"])
    return f"{match[1]}.{module}.{match[3]}"


def fit_layout(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Return adapter tensors with A and B of a stack exchanged if that gives the expected shapes; others are unchanged.

    A system that stores a stack transposed has the low-rank product of the transpose: its A is B of each expert,
    transposed.
    """
    fitted = dict(tensors)
    ranks = [tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".A") and ".experts." not in name]
    for name in tensors:
        other = f"{name.removesuffix('.A')}.B"
        if (
            ".experts." in name
            and name.endswith(".A")
            and ranks
            and other in tensors
            and shapes.get(name) not in (None, tensors[name].shape)
        ):
            pair = exchange_factors(tensors[name], tensors[other], rank=ranks[0])
            if (pair[0].shape, pair[1].shape) == (shapes.get(name), shapes.get(other)):
                fitted[name], fitted[other] = pair
    return fitted


def exchange_factors(a: torch.Tensor, b: torch.Tensor, *, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of the transposed stack; the function is its own inverse.

    Args:
        a: Shape (E * R, X), the expert slowest.
        b: Shape (Y, R * E), the expert fastest.
        rank: R.
    """
    num_experts = a.shape[0] // rank
    turned_a = b.reshape(b.shape[0], rank, num_experts).permute(2, 1, 0).reshape(num_experts * rank, -1)
    turned_b = a.reshape(num_experts, rank, -1).permute(2, 1, 0).reshape(-1, rank * num_experts)
    return turned_a, turned_b


def weight_name(name: str) -> str:
    """Return "<layer>.<rest>" for a weight of a layer, else "<module>.<weight>", independent of wrappers.

    Example:
        >>> weight_name("model.layers.3.self_attn.q_norm.weight"), weight_name("model.embed_tokens.weight")
        ('3.self_attn.q_norm.weight', 'embed_tokens.weight')
    """
    match = _LAYER_NAME.search(name)
    return match[1] if match else ".".join(name.split(".")[-2:])


def trainable_tensors(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable tensors of a model by canonical name, each once: adapters, or in full fine-tuning weights.

    Raises:
        ValueError: Weights are trained in addition to adapters, or two tensors share a name.
    """
    wrapped = {
        name: module.parameter_name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "parameter_name", None), str)
    }
    # A tied weight is one parameter with two names: named_parameters has it once, under the first name.
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapter_keys = {name: canonical_name(name, parameter=wrapped.get(name.partition(".lora_")[0])) for name in trained}
    has_adapters = any(adapter_keys.values())
    tensors: dict[str, torch.nn.Parameter] = {}
    for name, parameter in trained.items():
        key = adapter_keys[name] if has_adapters else weight_name(name)
        if key is None or key in tensors:
            raise ValueError(
                f"{name} is trained and is {'no adapter' if key is None else 'the second tensor called ' + key}."
            )
        tensors[key] = parameter
    return tensors


def trainable_adapters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable tensors of a model by canonical name.

    Raises:
        ValueError: Something other than adapters is trained, or two tensors share a name.
    """
    tensors = trainable_tensors(model)
    others = [key for key in tensors if not key.endswith((".A", ".B"))]
    if others:
        raise ValueError(f"{others[0]} is trained and is no adapter.")
    return tensors


@torch.no_grad()
def load_adapter(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the ruler's adapter values into a model, in the dtype the system keeps its adapters in.

    Raises:
        ValueError: The model's adapters are not exactly those of the file.
    """
    adapters = trainable_adapters(model)
    values = {canonical_name(name) or name: tensor for name, tensor in tensors.items()}
    _check_names(adapters, values, file="adapter file")
    values = fit_layout(values, {name: parameter.shape for name, parameter in adapters.items()})
    for name, parameter in adapters.items():
        _copy_value(parameter, values[name], name=name, file="adapter file")


@torch.no_grad()
def load_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore every weight of a model from its file, in place, because an earlier case of this process has trained
    it.

    Args:
        model: A model with all weights trained.
        tensors: Values by the names in the model's files; one is read at a time.

    Raises:
        ValueError: The trained weights are not exactly those in the files.
    """
    weights = trainable_tensors(model)
    names = {weight_name(name): name for name in tensors}
    _check_names(weights, names, file="model's file")
    for name, parameter in weights.items():
        _copy_value(parameter, tensors[names[name]], name=name, file="model's file")


def load_start(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set a model to the start of every case: its adapters if the files hold adapters, else all weights.

    Args:
        model: Its trained tensors are those in the files.
        tensors: Result of WorkloadFiles.read_trained.

    Raises:
        ValueError: As load_adapter and load_weights.
    """
    holds_adapters = any(canonical_name(name) for name in tensors)
    (load_adapter if holds_adapters else load_weights)(model, tensors)


def _check_names(trained: Mapping[str, Any], given: Mapping[str, Any], *, file: str) -> None:
    if set(trained) != set(given):
        difference = sorted(set(trained) ^ set(given))
        raise ValueError(
            f"The model trains {len(trained)} tensors, the {file} has {len(given)}; they differ in {difference[:4]}."
        )


def _copy_value(parameter: torch.nn.Parameter, value: torch.Tensor, *, name: str, file: str) -> None:
    if parameter.shape != value.shape:
        raise ValueError(
            f"{name} has the shape {tuple(parameter.shape)} in the model and {tuple(value.shape)} in the {file}."
        )
    parameter.copy_(value)


def view_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of all trained tensors by canonical name, without a copy; missing ones are omitted."""
    return {
        name: parameter.grad.detach()
        for name, parameter in trainable_tensors(model).items()
        if parameter.grad is not None
    }


def read_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the result of view_gradients, copied to the CPU, so that it outlives the step."""
    return {name: gradient.cpu() for name, gradient in view_gradients(model).items()}


def save_gradients(gradients: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the reference gradients in their own dtype."""
    write_tensors(gradients, path)


def load_gradients(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the reference gradients; each is read on access."""
    return TensorFiles([path])


def judge(
    gradients: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    *,
    device: str = "cpu",
    limits: Limits = Limits(),
) -> Verdict:
    """Compare gradients with the plain arm's.

    Args:
        gradients: By canonical name, any float dtype.
        reference: The plain arm's, by the same names.
        device: Device of the comparison.
        limits: Limits of the differences.
    """
    missing = sorted(set(reference) - set(gradients))
    surplus = sorted(set(gradients) - set(reference))
    if missing or surplus or not reference:
        return Verdict(
            False,
            f"{len(missing)} tensors without a gradient {missing[:3]}, {len(surplus)} that the plain arm does not "
            f"train {surplus[:3]}",
        )
    gradients = fit_layout(gradients, {name: tensor.shape for name, tensor in reference.items()})
    misshapen = [name for name in reference if gradients[name].shape != reference[name].shape]
    if misshapen:
        first = misshapen[0]
        return Verdict(
            False,
            f"{first} has the shape {tuple(gradients[first].shape)}, the plain arm's {tuple(reference[first].shape)}",
        )
    rows = [(name, *_compare(gradients[name], reference[name], device=device)) for name in reference]
    by_cosine = sorted(rows, key=lambda row: _low_first(row[1]))
    by_norm = sorted(rows, key=lambda row: -_high(row[2]))
    failed = [row for row in rows if not (row[1] >= limits.min_cosine and row[2] <= limits.max_norm_error)]
    worst, widest = by_cosine[0], by_norm[0]
    reason = ""
    if failed:
        reason = (
            f"{len(failed)} of {len(rows)} gradients differ from the plain arm's: lowest cosine {worst[1]:.5f} "
            f"({worst[0]}), "
            f"largest norm difference {widest[2]:.2%} ({widest[0]})"
        )
    return Verdict(
        passed=not failed,
        reason=reason,
        num_tensors=len(rows),
        worst_cosine=(worst[0], worst[1]),
        worst_norm_error=(widest[0], widest[2]),
        median_cosine=by_cosine[len(rows) // 2][1],
        lowest=tuple(by_cosine[:5]),
        limits=limits,
    )


def first_reference(model_gradients: Mapping[str, torch.Tensor]) -> Verdict:
    """Judge the plain arm by itself: every gradient must exist, be finite and not be zero."""
    broken = sorted(_not_training(model_gradients.items()))
    reason = f"{len(broken)} gradients of the plain arm are zero or not finite: {broken[:3]}" if broken else ""
    return Verdict(
        not broken,
        reason,
        num_tensors=len(model_gradients),
        worst_cosine=("", 1.0),
        worst_norm_error=("", 0.0),
        median_cosine=1.0,
    )


def _not_training(items: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
    for name, gradient in items:
        square = float(_products(gradient, gradient, device=gradient.device)[0])
        if not 0 < square < float("inf"):
            yield name


def _compare(gradient: torch.Tensor, reference: torch.Tensor, *, device: str) -> tuple[float, float]:
    """Return cosine and relative difference of norms, NaN where one of them is zero or not finite."""
    product, left_square, right_square = _products(gradient, reference, device=device)
    left_norm, right_norm = left_square.sqrt(), right_square.sqrt()
    cosine, error = product / (left_norm * right_norm), (left_norm / right_norm - 1).abs()
    return float(cosine), float(error)


def _products(left: torch.Tensor, right: torch.Tensor, *, device: str | torch.device) -> torch.Tensor:
    """Return the products left @ right, left @ left and right @ right in float64; shape (3,)."""
    products = torch.zeros(3, dtype=torch.float64, device=device)
    for left_part, right_part in zip(pieces(left), pieces(right)):
        a, b = left_part.to(device).double(), right_part.to(device).double()
        products += torch.stack([a @ b, a @ a, b @ b])
    return products


def _low_first(cosine: float) -> float:
    return cosine if cosine == cosine else -2.0


def _high(error: float) -> float:
    return error if error == error else float("inf")
