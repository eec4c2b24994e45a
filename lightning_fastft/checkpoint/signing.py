"""Signatures of checkpoints, for those who must tell what they wrote themselves from what somebody else wrote."""

from __future__ import annotations

import hashlib
import hmac
import os

KEY_VARIABLE = "FASTFT_CHECKPOINT_KEY"


def sign(sha256: str) -> str:
    """Return the HMAC-SHA256 of a digest by the key of the environment, in hexadecimal; empty where there is no key.

    A digest finds damage: anyone can compute it. A signature can be made with the key only.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    return hmac.new(key.encode(), sha256.encode(), hashlib.sha256).hexdigest() if key else ""


def describe_forgery(sha256: str, signature: str) -> str:
    """Return why a checkpoint is not taken for one of ours; empty where it is, or where the environment has no key."""
    expected = sign(sha256)
    if not expected or hmac.compare_digest(expected, signature):
        return ""
    what = "its signature was not made with this key" if signature else "it is not signed"
    return f"{what}, and {KEY_VARIABLE} is set, so that only signed checkpoints are loaded"
