"""GPUs by name: how much memory they have and how fast it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ..errors import OptionError, unknown_name


@dataclass(frozen=True)
class Card:
    """memory: bytes. bandwidth: bytes/s of the vendor's datasheet; None where nobody said."""

    name: str
    memory: int
    bandwidth: float | None


def _card(name: str, mebibytes: int, gigabytes_per_s: float) -> Card:
    return Card(name, mebibytes * 2**20, gigabytes_per_s * 1e9)


#: Memory as NVIDIA's driver reports it, which on L4, L40S and A10G is less than the name says because ECC takes
#: its part. Bandwidth from NVIDIA's datasheets and product pages of each card (A10G: AWS's of the G5 instance).
#: No card before Ampere: Triton does not support them.
CARDS = (
    _card("H200", 143771, 4800),
    _card("H100 SXM", 81559, 3350),
    _card("H100 PCIe", 81559, 2000),
    _card("A100 80GB", 81920, 2039),
    _card("A100 80GB PCIe", 81920, 1935),
    _card("A100 40GB", 40960, 1555),
    _card("L40S", 46068, 864),
    _card("L4", 23034, 300),
    _card("A10G", 23028, 600),
    _card("RTX 5090", 32607, 1792),
    _card("RTX 4090", 24564, 1008),
    _card("RTX 3090", 24576, 936),
)

#: What drivers call a card, where that is more than "NVIDIA" or "GeForce" beside the name.
_ALIASES = {
    "H100 80GB HBM3": "H100 SXM",
    "A100-SXM4-80GB": "A100 80GB",
    "A100-SXM4-40GB": "A100 40GB",
    "A100-PCIE-40GB": "A100 40GB",
}


def find_card(name: str) -> Card:
    """The card of this name, as a person or a driver writes it: "rtx4090", "NVIDIA A100-SXM4-80GB".

    Raises OptionError that lists the known names.
    """
    known = {_key(card.name): card for card in CARDS}
    known |= {_key(alias): known[_key(target)] for alias, target in _ALIASES.items()}
    if _key(name) not in known:
        raise unknown_name("GPU", name, [card.name for card in CARDS])
    return known[_key(name)]


def named_memory(memory: int, bandwidth: float | None) -> Card:
    """A card that is nothing but numbers. Raises OptionError for numbers out of range."""
    if memory < 1:
        raise OptionError(f"memory is {memory}", "it must be at least 1 byte")
    if bandwidth is not None and not 0 < bandwidth < float("inf"):
        raise OptionError(f"bandwidth is {bandwidth:g}", "it must be above 0")
    return Card("", memory, bandwidth)


def this_card() -> Card:
    """The first GPU of this machine, with its own memory and the bandwidth of its namesake in `CARDS`.

    Raises OptionError where there is none, or none that the table knows.
    """
    hint = "say --gpu NAME, or --memory and --bandwidth"
    if not torch.cuda.is_available():
        raise OptionError("no card is given, and this machine has no GPU", hint)
    reported = torch.cuda.get_device_name(0)
    try:
        card = find_card(reported)
    except OptionError as error:
        raise OptionError(f"the bandwidth of this machine's {reported!r} is not known", hint) from error
    return Card(card.name, torch.cuda.mem_get_info(0)[1], card.bandwidth)


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
