"""English text that every Python carries: the language reference behind `help()`, split into two parts.

Calibration takes the first part, perplexity the second, so that no compressed model is judged on text it
was fitted to. The text differs slightly between Python versions; comparisons hold within one.
"""

from __future__ import annotations

from pydoc_data import topics

#: Share of the topics, in the order of their keys, that calibration may see.
CALIBRATION_SHARE = 0.8


def calibration_text() -> str:
    """The first four fifths of the topics, joined by blank lines (about 320,000 characters)."""
    return _join(slice(0, _split()))


def held_out_text() -> str:
    """The last fifth of the topics, joined by blank lines (about 130,000 characters)."""
    return _join(slice(_split(), None))


def _split() -> int:
    return int(len(topics.topics) * CALIBRATION_SHARE)


def _join(part: slice) -> str:
    return "\n\n".join(topics.topics[key] for key in sorted(topics.topics)[part])
