"""slots against its reference, exactly."""

import pytest
import torch

pytest.importorskip("triton")

from thinrank.kernels import reference as ops
from thinrank.kernels.slots import slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("batch", [1, 16, 64, 70])
def test_slots(batch):
    """Ends of blocks, a table with a wider stride, entries beyond a row's position that no one may use."""
    generator = torch.Generator().manual_seed(batch)
    positions = torch.randint(0, 320, (batch,), generator=generator, dtype=torch.int32)
    positions[0] = 319
    positions[-1] = 64 * (batch % 3)
    tables = torch.randint(0, 2**25, (batch, 9), generator=generator, dtype=torch.int32)
    tables[:, 5:] = -1
    out = torch.full((batch + 1,), -7, device=DEVICE)
    positions, tables = positions.to(DEVICE), tables.to(DEVICE)[:, :7]
    slots(positions, tables, out[:batch])
    assert torch.equal(out[:batch], ops.slots(positions, tables, 64))
    assert int(out[batch]) == -7
    row = batch - 1
    assert int(out[row]) == int(tables[row, positions[row] // 64]) * 64 + int(positions[row]) % 64
