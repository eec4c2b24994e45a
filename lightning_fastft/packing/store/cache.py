"""Tokenise a data set once and cache it on disk by fingerprint; later runs memory-map it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fastft.core.checks import check_int, check_share
from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.reading.sources import REJECTED, Source, open_sources
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.rows.template_options import OPTIONS
from lightning_fastft.packing.store.dataset import TokenizedDataset, replace_file
from lightning_fastft.packing.store.ingest import Ingest, check_highest_id, check_share_of_rejects, write_rejects
from lightning_fastft.packing.tokens import chat
from lightning_fastft.packing.tokens.tokenisation import Setup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_fastft.hf.images import ImageEncoder

_LOGGER = logging.getLogger(__name__)
# Increase it if the same rows give other tokens: entries of the cache are found by the fingerprint.
_FINGERPRINT_VERSION = 5


def tokenize_sources(
    sources: object,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    options: FormatOptions,
    cache_dir: str | Path | None = None,
    num_proc: int = 0,
    max_reject_share: float = 0.01,
    rejected_path: str | Path | None = None,
    stopped_path: str | Path | None = None,
    vocab_size: int | None = None,
    images: ImageEncoder | None = None,
    stop_ids: tuple[int, ...] | None = (),
    show_progress: bool = False,
) -> TokenizedDataset:
    """Return the examples of all sources as tokens, from the cache if it has them.

    Rows are validated one by one. An invalid row is written to rejected.jsonl with file, line, reason and first bytes;
    the other rows are kept.

    Args:
        sources: Files, folders, hub ids, data sets, lists of rows or a mixture; see open_sources.
        tokenizer: A Hugging Face tokenizer; None if all rows have input_ids.
        options: Options for turning rows into tokens.
        cache_dir: Folder of cache entries; None keeps tokens in memory.
        num_proc: Worker processes for what is left after 10 s; 0 and 1 tokenise in this process.
        max_reject_share: Share of rows, 0 to 1, that may be rejected; more stop the run.
        rejected_path: File for rejected rows; None writes them to the cache, if there is one.
        stopped_path: File for rejected rows if the run stops; None is rejected_path, or else the cache.
        vocab_size: Rows of the model's embedding; ids outside stop the run. None if it is not known yet.
        images: Expands the image placeholders of a text; None rejects rows with images.
        stop_ids: Ids of tokens at which generation stops, as in Formatter.
        show_progress: Whether to show a progress bar on stderr.

    Returns:
        At least one example.

    Raises:
        DataError: A source is missing or empty, too many rows are rejected, a token id is impossible, rows are too long
            under too_long="refuse", or no example is left.
        OptionError: A number is outside of its range.

    Cost:
        One pass over the rows. From the cache: one pass over its files, the data files and the tokenizer's vocabulary.

    Example:
        >>> rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
        >>> dataset = tokenize_sources(rows, tokenizer=None, options=FormatOptions(max_tokens=8))
        >>> dataset.length_N, dataset[1].labels
        (array([3, 2]), array([4, 5]))
    """
    check_int("num_proc", num_proc, low=0)
    check_share("max_reject_share", max_reject_share)
    if vocab_size is not None:
        check_int("vocab_size", vocab_size, low=1)
    opened = open_sources(sources)
    setup = Setup(tokenizer, options, vocab_size, images, stop_ids)
    fingerprint = _fingerprint(opened, setup)
    target = None if cache_dir is None else Path(cache_dir).expanduser() / _name_entry(opened, fingerprint=fingerprint)
    named = None if rejected_path is None else Path(rejected_path).expanduser()
    dataset = _open_if_whole(target)
    if dataset is None:
        fallback = None if cache_dir is None else Path(cache_dir).expanduser() / REJECTED
        on_stop = named or fallback if stopped_path is None else Path(stopped_path)
        ingest = Ingest(setup, max_reject_share=max_reject_share, on_stop=on_stop)
        dataset = ingest.run(
            opened, num_proc=num_proc, target=target, fingerprint=fingerprint, show_progress=show_progress
        )
        if named is not None:
            write_rejects(named, ingest.rejects)
    elif target is not None and named is not None and (dataset.report.rejects or named.exists()):
        replace_file(named, (target / REJECTED).read_bytes())
    check_share_of_rejects(
        dataset.report, most=max_reject_share, written=named or (None if target is None else target / REJECTED)
    )
    check_highest_id(dataset.report, tokenizer=tokenizer, vocab_size=vocab_size)
    return dataset


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return a digest of a tokenizer: vocabulary, rules, special tokens and chat template.

    Its padding and truncation settings are ignored.

    Cost:
        Serialises the vocabulary once.
    """
    if tokenizer is None:
        return "none"
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    if tokenizer.is_fast:
        rules = tokenizer.backend_tokenizer.to_str()
        # Skip version, truncation and padding, which come before the rules.
        digest.update(rules[rules.index('"added_tokens"') :].encode())
    else:
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        # Its rules are Python code, which flags such as do_lower_case change.
        flags = {name for name, value in tokenizer.init_kwargs.items() if isinstance(value, bool)}
        chosen = {name: bool(getattr(tokenizer, name, tokenizer.init_kwargs[name])) for name in flags}
        digest.update(json.dumps(chosen, sort_keys=True).encode())
    if getattr(tokenizer, "split_special_tokens", False):
        # No rule of the backend: each call sets it.
        digest.update(b"split_special_tokens")
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    digest.update(json.dumps([special, tokenizer.chat_template], sort_keys=True).encode())
    return digest.hexdigest()


def _fingerprint(sources: list[Source], setup: Setup) -> str:
    tokenizer, options, images, stop_ids = setup.tokenizer, setup.options, setup.images, setup.stop_ids
    chosen = asdict(options)
    if options.step_separator == FormatOptions.step_separator:
        # Entries from before this option keep their fingerprint.
        del chosen["step_separator"]
    if not options.chat_template_kwargs:
        del chosen["chat_template_kwargs"]
    if tokenizer is not None:
        chosen["chat_template"] = chat.read_template(tokenizer, options.chat_template)
    parts = [_FINGERPRINT_VERSION, [source.fingerprint for source in sources], fingerprint_tokenizer(tokenizer), chosen]
    if images is not None:
        # Paths of images are relative to these folders.
        parts += [images.fingerprint, [source.folder for source in sources]]
    if images is not None or chosen["chat_template"] is not None:
        # Only conversations depend on these: other entries keep their fingerprint.
        parts.append({"read": [OPTIONS], "arguments": "JSON values"})
        if options.add_eos and stop_ids is not None:
            parts.append({"stop_ids": stop_ids})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _name_entry(sources: list[Source], *, fingerprint: str) -> str:
    """Return the name of a cache entry, which depends on the content, and on names and entries in its report."""
    named: list[object] = [fingerprint, *([source.name, source.stamp] for source in sources)]
    if any(source.entry for source in sources):
        named.append([source.entry for source in sources])
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]


def _open_if_whole(target: Path | None) -> TokenizedDataset | None:
    """Return the cache entry; None if there is none. Remove a damaged entry."""
    if target is None or not os.path.isdir(target):
        return None
    try:
        return TokenizedDataset.open(target)
    except DataError as error:
        _LOGGER.warning("%s It is deleted now.", error)
        shutil.rmtree(target, ignore_errors=True)
        return None
