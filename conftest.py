import pytest
import torch
from torch import nn

import varprop


@pytest.fixture(autouse=True)
def names_in_doctests(doctest_namespace: dict[str, object]) -> None:
    """What an example may use without importing it."""
    doctest_namespace.update(torch=torch, nn=nn, vp=varprop)
    torch.manual_seed(0)
