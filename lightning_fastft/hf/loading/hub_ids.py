"""Tell a path to nothing from a hub id, before transformers asks the hub for it."""

from __future__ import annotations

from pathlib import Path

from lightning_fastft.core.errors import OptionError


def refuse_missing_path(name: str, *, option: str = "model") -> None:
    """Refuse a path to nothing, which the hub would be asked for; a hub id has one slash at most, inside.

    Raises:
        OptionError: There is no such folder or file; and if it may be a hub id, the hub cannot be asked for it.
    """
    if Path(name).exists():
        return
    is_path = name.startswith((".", "/", "~")) or name.endswith(("/", ".json")) or name.count("/") > 1
    parent, slash, _ = name.partition("/")
    if is_path or (slash and Path(parent).is_dir()):
        reason = "" if is_path else _ask_hub(name)
        if is_path or reason:
            raise OptionError(
                f"There is no folder or file {name!r} (searched from {Path.cwd()}){reason}. Correct {option}."
            )


def _ask_hub(name: str) -> str:
    """Return why a model cannot be asked of the hub; "" if the hub answers, or the cache has files of the model.

    transformers asks a hub that cannot be reached again and again, for about 20 seconds.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
    from huggingface_hub.file_download import repo_folder_name

    try:
        if (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")).exists():
            return ""
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HfHubHTTPError:
        # transformers explains what the hub answers.
        return ""
    except (HTTPError, OSError, HFValidationError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f", and the hub cannot be asked for a model of this name: {reason.rstrip('.')}"
    return ""
