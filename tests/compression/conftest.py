import pytest

from tiny_text_models import TEXT


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def calibrated(text_file):
    """Options of a small calibration whose Gram matrices are regular."""
    options = {"calibration_text": text_file, "calibration_samples": 8, "calibration_length": 32}
    return options | {"device": "cpu", "progress": False}
