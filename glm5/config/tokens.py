"""Numbers of tokens with suffixes, as in vLLM: 32k is 32,000 and 32K is 32,768."""

import re
from decimal import Decimal

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kmgtKMGT])", flags=re.ASCII)
_PLAIN = re.compile(r"[+-]?\d+", flags=re.ASCII)


def number_of(text: str) -> int | str:
    """The number that a text with a suffix means; a plain number stays as it is, for its field to check.

    Raises ValueError with what is allowed.
    """
    text = text.strip()
    if _PLAIN.fullmatch(text):
        return text
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError("an integer, or one with a suffix such as 32k (32000) or 32K (32768)")
    digits, suffix = found.groups()
    if "." in digits and suffix.isupper():
        raise ValueError(f"no decimals before {suffix}; 1.5k is 1500")
    return int(Decimal(digits) * _SUFFIXES[suffix])
