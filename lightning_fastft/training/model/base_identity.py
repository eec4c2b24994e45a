"""The base that adapters of a checkpoint belong to: its digest and seed, and the names of its adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.core.errors import ResumeError

if TYPE_CHECKING:
    from lightning_fastft.hf.loading.source import ModelSource


# The first one that a checkpoint and a run both have is compared.
_KINDS = ("files", "tensors", "values", "halves")


def digest_base(model: Any, *, source: ModelSource | None) -> str:
    """Return the digests of a frozen base, separated by spaces.

    The first is that of its files, or of its tensors if there are no files. Those of its values compare these two. What
    is not in memory yet has none.
    """
    from lightning_fastft.hf.base_digest import digest_files, digest_tensors, digest_values

    if source is not None and source.init == "pretrained":
        from lightning_fastft.hf.loading.source import weight_files

        paths = weight_files(source)
        own = digest_files(paths) if paths else ""
    else:
        own = digest_tensors(model, is_trained_too=not hasattr(model, "peft_config"))
    file_dtype = source.config.dtype if source is not None and source.init == "pretrained" else None
    return f"{own} {digest_values(model, file_dtype=file_dtype)}".strip()


def describe_base(source: ModelSource | None, *, seed: int, digest: str) -> dict[str, Any]:
    """Return what a checkpoint keeps of the base."""
    name, init = (None, "given") if source is None else (source.name, source.init)
    return {"name": name, "init": init, "seed": seed, "digest": digest}


def check_base(
    saved: Mapping[str, Any], *, source: ModelSource | None, seed: int | None, digest: str, accept_other: bool
) -> None:
    """Check that adapters were trained on this base; a checkpoint without a digest is accepted.

    Raises:
        ResumeError: The base of this run has other weights, or was initialised with another seed.
    """
    if saved.get("init") == "random" and seed is not None and saved["seed"] != seed:
        raise ResumeError(
            f"The adapters were trained on a base initialised with seed {saved['seed']}, this run has {seed}: call "
            f"seed_everything({saved['seed']})."
        )
    recorded, present = _by_kind(str(saved.get("digest", ""))), _by_kind(digest)
    kind = next((kind for kind in _KINDS if kind in recorded and kind in present), None)
    saved_digits, digits = (digests.get(str(kind), "") for digests in (recorded, present))
    inits = {str(saved.get("init")), "given" if source is None else source.init}
    # Without a common digest: files have no random weights.
    is_other = kind is None and inits == {"random", "pretrained"}
    if not is_other and saved_digits == digits:
        return
    found = (
        f"The adapters were trained on the base {saved.get('name') or 'of the run'} with other weights than the "
        "present one has"
    )
    if not accept_other:
        raise ResumeError(
            f"{found} (digest {saved_digits[:12]}, now {digits[:12]}). Give the base of that run, or accept this one: "
            "FineTuner(..., accept_other_base=True), --model.accept_other_base true, or --accept-other-base in an "
            "export."
        )
    rank_zero_warn(f"{found}; they are loaded all the same (accept_other_base=True).")


def _by_kind(digests: str) -> dict[str, str]:
    return {kind: digits for kind, _, digits in (part.partition(":") for part in digests.split())}


def check_adapter_names(saved: Collection[str], *, expected: Collection[str], has_default_targets: bool) -> None:
    """Check that a checkpoint holds the adapters of this run.

    Raises:
        ResumeError: Adapter weights are missing, or other weights than those of adapters are present.
    """
    missing, left_over = set(expected) - set(saved), set(saved) - set(expected)
    if not missing and not left_over:
        return
    advice = "Use the lora settings of the run that wrote it."
    if has_default_targets:
        advice += (
            " Where lora names no target_modules, earlier versions adapted other layers of mixtures of experts: resume "
            "theirs with lora={..., 'target_modules': 'all-linear'}."
        )
    raise ResumeError(
        f"The checkpoint does not hold the adapters of this run: {_shorten(missing)} missing, {_shorten(left_over)} "
        f"left over. {advice}"
    )


def _shorten(names: Collection[str]) -> str:
    """Return the count and up to three names."""
    shown = ", ".join(sorted(names)[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})" if names else "0"
