"""``fastft push``: show the files and the model card of a trained model, and upload them to the hub with ``--yes``."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fastft.cli.arguments import Arguments
from lightning_fastft.cli.trained.opening import add_options, check_source, read_request, read_task
from lightning_fastft.core.errors import CheckpointNotSavedError, FastFTError, OptionError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

CARD = "README.md"
_KIB = 1024
_WEIGHTS = (".safetensors", ".bin", ".gguf")
# Files of a repository from which other libraries choose the model that they load.
_MODEL_FILE = re.compile(r"adapter_config\.json|[^/]+\.safetensors(\.index\.json)?")
# Options that say how a model is built; a folder that is uploaded as it is has no use for them.
_BUILDING = ("base", "tokenizer", "device", "accept_other_base")


def run_push(words: Sequence[str]) -> int:
    """Print the files and the model card of a repository, and upload them with ``--yes``; return 0.

    Args:
        words: A checkpoint, which is exported first, or a folder of adapters or of a whole model, which is uploaded as
            it is; then the repository. ``--merge`` merges adapters, ``--private`` makes a new repository private,
            ``--base``, ``--tokenizer``, ``--device`` and ``--accept-other-base`` as for export.

    Raises:
        OptionError: A value is not allowed, there is no login, or the repository is public or holds another model.
        FastFTError: The upload failed.
    """
    args = _parse_args(words)
    source = args.request.source
    if args.is_as_it_is:
        return _push(source, _read_card(args), args=args)
    from lightning_fastft.cli.trained.writing import write_trained

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        try:
            write_trained(args.request, folder, title=args.title)
        except CheckpointNotSavedError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            raise CheckpointNotSavedError(
                f"The model is exported to a temporary folder first, which failed in {Path(place).parent}: "
                f"{error.__cause__}. If the disk is full, set TMPDIR to a folder of a larger one."
            ) from error
        return _push(folder, (folder / CARD).read_text(encoding="utf-8"), args=args)


def _read_card(args: Namespace) -> str:
    """Return the model card of a folder: the one that is there if it was filled in, else ours."""
    from lightning_fastft.cli.trained.card import keeps_card, read_facts, render_card

    source = args.request.source
    card = source / CARD
    try:
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
    except UnicodeDecodeError as error:
        raise OptionError(f"{card} is not UTF-8 text: {error}. Convert it, or delete it to get a new one.") from error
    return text if keeps_card(text) else render_card(read_facts(source), title=args.title)


def _push(folder: Path, card: str, *, args: Namespace) -> int:
    """Print files and card; upload them in one commit if asked for."""
    from lightning_fastft.cli.trained.card import REPOSITORY
    from lightning_fastft.cli.trained.modelfile import find_missing_gguf

    shown = card.replace(REPOSITORY, args.repository)
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    names = {str(file.relative_to(folder)): file for file in files if file != folder / CARD}
    _check_weights(folder, names)
    sizes = {CARD: len(shown.encode()), **{name: file.stat().st_size for name, file in names.items()}}
    lines = [f"{args.repository}: {len(sizes)} files, {_size(sum(sizes.values()))}"]
    lines += [f"  {_size(size):>12}  {name}" for name, size in sizes.items()]
    if missing := find_missing_gguf(folder):
        named = ", ".join(missing)
        lines.append(f"Modelfile names {named}, which {folder} lacks: add it, or delete Modelfile.")
    sys.stdout.write("\n".join([*lines, "", shown]) + "\n")
    if args.dry_run or not args.yes:
        in_dry_run = "Remove --dry-run" if args.yes else "Give --yes in place of --dry-run"
        change = in_dry_run if args.dry_run else "Add --yes"
        sys.stdout.write(f"Nothing was uploaded. {change} to upload.\n")
        return 0
    sys.stdout.write(f"Uploaded: {_upload(args, card=card, names=names)}\n")
    return 0


def _check_weights(folder: Path, names: Collection[str]) -> None:
    """Raise if a folder has no weights, or not all that its index lists."""
    if not any(name.endswith(_WEIGHTS) for name in names):
        raise OptionError(f"{folder} has no weights ({', '.join(_WEIGHTS)}). Copy them there.")
    for index in folder.glob("*.safetensors.index.json"):
        listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(listed.difference(names)):
            raise OptionError(f"{folder} lacks {', '.join(missing)}, which {index.name} lists. Copy them there.")


def _upload(args: Namespace, *, card: str, names: dict[str, Path]) -> str:
    """Make the repository if it is new, upload everything in one commit, and return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError

    from lightning_fastft.cli.trained.card import REPOSITORY

    api = HfApi()
    try:
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(file)) for name, file in names.items()]
        address = api.create_repo(args.repository, private=args.private or None, exist_ok=True)
        # The hub adds the owner to a name without one.
        _check_present(api.model_info(address.repo_id), names, wants_private=args.private)
        card = card.replace(REPOSITORY, address.repo_id)
        operations.insert(0, CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=card.encode()))
        api.create_commit(address.repo_id, operations, commit_message="Upload with lightning_fastft")
    except FastFTError:
        raise
    # No connection, a refusal of the hub, a file that was not sent (RuntimeError), metadata of the card (ValueError).
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        cause = "" if error.__cause__ is None else f" ({' '.join(str(error.__cause__).split())})"
        raise FastFTError(
            f"The upload to {args.repository} failed: {' '.join(str(error).split())}{cause} A push is one commit: the "
            "repository gets all files or none. Correct the cause and push again."
        ) from error
    return str(address)


def _check_present(present: ModelInfo, names: Collection[str], *, wants_private: bool) -> None:
    """Raise if a repository is public against the wish, or would hold two models after the upload."""
    if wants_private and not present.private:
        raise OptionError(
            f"{present.id} exists and is public, and nothing was uploaded. Make it private in its settings on the hub, "
            "or remove --private."
        )
    there = [file.rfilename for file in present.siblings or ()]
    others = [name for name in there if _MODEL_FILE.fullmatch(name) and name not in names]
    if others:
        raise OptionError(
            f"{present.id} has files of another model, {', '.join(others)}, which may be loaded in place of the new "
            "one. Nothing was uploaded. Delete them on the hub, or name another repository."
        )


def _size(num_bytes: int) -> str:
    """Return a size in the unit that reads best.

    Example:
        >>> _size(900), _size(20_000), _size(3_000_000)
        ('900 B', '19.5 KiB', '2.9 MiB')
    """
    if num_bytes < _KIB:
        return f"{num_bytes} B"
    return f"{num_bytes / _KIB:,.1f} KiB" if num_bytes < _KIB**2 else f"{num_bytes / _KIB**2:,.1f} MiB"


def _check_repository(name: str) -> None:
    """Raise if the hub would refuse the name of a repository, with or without its owner."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise OptionError(
            f"REPO must be owner/name, or a name for your own account, got {name!r}. {str(error).partition(':')[0]}."
        ) from error


def _parse_args(words: Sequence[str]) -> Namespace:
    """Parse and check the command line."""
    arguments = Arguments("push")
    arguments.add_argument("source", metavar="CHECKPOINT|FOLDER")
    arguments.add_argument("repository", metavar="REPO")
    add_options(arguments)
    arguments.add_argument("--merge", action="store_true")
    arguments.add_argument("--private", action="store_true")
    arguments.add_argument("--yes", action="store_true")
    arguments.add_argument("--dry-run", action="store_true")
    given = arguments.read(words)
    _check_repository(given.repository)
    given.title = given.repository.rpartition("/")[2]
    source = check_source(given.source)
    # A run of fastft_fsdp writes a checkpoint as a folder with meta.pt.
    has = {name: (source / name).is_file() for name in ("meta.pt", "adapter_config.json", "config.json")}
    if source.is_dir() and not any(has.values()):
        raise OptionError(f"{source} has no adapter_config.json and no config.json: it is not the folder of a model.")
    if source.is_dir():
        # Refuses a damaged configuration.
        read_task(source)
    given.is_as_it_is = source.is_dir() and not has["meta.pt"] and not given.merge
    if given.is_as_it_is and (idle := [f"--{name.replace('_', '-')}" for name in _BUILDING if getattr(given, name)]):
        advice = " To build another model from the adapters, add --merge." if has["adapter_config.json"] else ""
        raise OptionError(f"{', '.join(idle)} would have no effect: {source} is uploaded as it is.{advice}")
    if given.yes and not given.dry_run:
        _check_login()
    given.request = read_request(given, device="cpu", is_merged=given.merge, takes_whole=False)
    return given


def _check_login() -> None:
    """Raise without a login, before a checkpoint is exported for minutes."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise OptionError("Nobody is logged in to huggingface.co. Run: hf auth login")
