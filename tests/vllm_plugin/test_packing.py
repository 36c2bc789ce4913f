"""What a process keeps of the checkpoint, without vLLM."""

import pytest
import torch

from thinrank.errors import CheckpointError
from thinrank.integrations import vllm
from thinrank.integrations.vllm.packing import Factors, Shard

#: The second of two processes: 3 of 6 columns of a factor_in of rank 2, padded to 4, and of one of rank 5.
Q = Shard("q", (2, 6), ((0, 2), (3, 6)), (4, 3))
K = Shard("k", (5, 6), ((0, 5), (3, 6)), (5, 3))


def tensor(shard: Shard) -> torch.Tensor:
    return torch.arange(1.0, 1 + shard.shape[0] * shard.shape[1]).view(shard.shape)


@pytest.fixture
def factors() -> Factors:
    return Factors()


def test_the_plugin_is_imported_without_vllm():
    assert callable(vllm.register)


def test_shards_are_cut_and_padded(factors):
    packing = factors.pack({"q": Q, "k": K}, torch.float32, "qkv_proj")
    q, k = packing.views(packing.parameter.data).values()
    assert q[:2].isnan().all() and k.isnan().all()  # visible in every output until they are loaded
    assert list(packing.missing()) == ["q", "k"]
    packing.load(packing.parameter, tensor(K), "k")
    assert list(packing.missing()) == ["q"]
    packing.load(packing.parameter, tensor(Q), "q")
    assert list(packing.missing()) == []
    assert torch.equal(k, tensor(K)[:, 3:])
    assert torch.equal(q, torch.cat([tensor(Q)[:, 3:], torch.zeros(2, 3)]))


def test_tied_layers_have_one_parameter(factors):
    first = factors.pack({"q": Q, "k": K}, torch.float32, "layers.0")
    second = factors.pack({"q": Q, "k": K}, torch.float32, "layers.1")
    assert first.parameter is second.parameter


def test_a_tied_tensor_reaches_layers_that_share_only_a_part(factors):
    first = factors.pack({"q": Q, "k": K}, torch.float32, "layers.0")
    second = factors.pack({"q": Q}, torch.float32, "layers.1")
    first.load(first.parameter, tensor(Q), "q")
    assert list(first.missing()) == ["k"] and list(second.missing()) == []
    assert torch.equal(second.parameter[:6].view(2, 3), tensor(Q)[:, 3:])


@pytest.mark.parametrize(
    ("shape", "shard_id", "message"),
    [
        ((3, 6), "q", r"wrong shape for q \(\[3, 6\], the config says \[2, 6\]\)"),
        ((2, 3), "q", "wrong shape for q"),  # as if it had been cut already
        ((2, 6), "v", r"unexpected tensor \[2, 6\] for qkv_proj \(v\)"),
    ],
)
def test_what_does_not_belong_is_refused(shape, shard_id, message, factors):
    packing = factors.pack({"q": Q, "k": K}, torch.float32, "qkv_proj")
    with pytest.raises(CheckpointError, match=message):
        packing.load(packing.parameter, torch.ones(shape), shard_id)


def test_a_second_tensor_of_a_name_is_refused(factors):
    packing = factors.pack({"q": Q}, torch.float32, "qkv_proj")
    packing.load(packing.parameter, tensor(Q), "q")
    with pytest.raises(CheckpointError, match="holds q twice"):
        packing.load(packing.parameter, tensor(Q), "q")
