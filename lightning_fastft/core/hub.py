"""Ask the hub once whether it can be reached, before a library asks again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def ask_hub(name: str, *, kind: Literal["model", "dataset"]) -> str:
    """Return why the hub cannot be asked for a name; "" if it answers, or its cache has files of that name.

    transformers and datasets ask a hub that cannot be reached again and again, for about 20 seconds.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
    from huggingface_hub.file_download import repo_folder_name

    file = "config.json" if kind == "model" else "README.md"
    try:
        if (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)).exists():
            return ""
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind))
    except HfHubHTTPError:
        # The library explains what the hub answers.
        return ""
    except (HTTPError, OSError, HFValidationError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        noun = {"model": "model", "dataset": "data set"}[kind]
        return f", and the hub cannot be asked for a {noun} of this name: {reason.rstrip('.')}"
    return ""
