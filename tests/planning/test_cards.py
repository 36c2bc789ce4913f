"""Cards by the names that people and drivers use."""

from types import SimpleNamespace

import pytest
import torch

from thinrank.errors import OptionError
from thinrank.planning.cards import CARDS, find_card, this_card


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("h200", "H200"),
        ("NVIDIA H200", "H200"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("a100-80gb", "A100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
    ],
)
def test_names(name: str, card: str) -> None:
    assert find_card(name).name == card


@pytest.mark.parametrize("name", ["", "4090", "RTX 4090 Laptop GPU", "A100", "T4"])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    with pytest.raises(OptionError, match=r"A100 40GB, .*RTX 5090"):
        find_card(name)


def test_no_two_cards_share_a_name_and_none_is_absurd() -> None:
    assert len({card.name for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert find_card(card.name) is card
        assert 16 * 2**30 < card.memory < 200 * 2**30
        assert card.bandwidth is not None
        assert 200e9 < card.bandwidth < 8e12


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        get_device_name=lambda device: "NVIDIA L4",
        mem_get_info=lambda device: (1, 23 * 2**30),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    card = this_card()
    assert (card.name, card.memory, card.bandwidth) == ("L4", 23 * 2**30, 300e9)
    cuda.get_device_name = lambda device: "NVIDIA Unheard-of"
    with pytest.raises(OptionError, match=r"Unheard-of.*--memory"):
        this_card()
    cuda.is_available = lambda: False
    with pytest.raises(OptionError, match=r"no GPU.*--gpu"):
        this_card()
