from collections.abc import Iterator

import pytest
import torch

from .many import write_counts


@pytest.fixture
def float64() -> Iterator[None]:
    """Double precision by default, for comparisons with exact values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def pytest_sessionfinish() -> None:
    write_counts()
