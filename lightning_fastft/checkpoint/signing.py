"""Sign checkpoints with a secret key, so that checkpoints of other origin can be rejected."""

from __future__ import annotations

import hashlib
import hmac
import os

KEY_VARIABLE = "FASTFT_CHECKPOINT_KEY"


def sign(sha256: str) -> str:
    """Return the HMAC-SHA256 of a digest with the key of the environment, in hexadecimal; "" without a key.

    A digest detects damage, but anyone can compute it. A signature needs the key.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    return hmac.new(key.encode(), sha256.encode(), hashlib.sha256).hexdigest() if key else ""


def describe_forgery(sha256: str, signature: str) -> str:
    """Return the reason to reject a signature; "" if it is valid, or if the environment has no key."""
    expected = sign(sha256)
    if not expected or hmac.compare_digest(expected, signature):
        return ""
    what = "its signature was not made with this key" if signature else "it is not signed"
    return f"{what}, and {KEY_VARIABLE} is set, so that only signed checkpoints are loaded"
