import pytest
import torch
from torch import nn

import varprop


@pytest.fixture(autouse=True)
def names_in_doctests(doctest_namespace: dict[str, object]) -> None:
    """The names that a doctest may use without importing them."""
    doctest_namespace.update(torch=torch, nn=nn, vp=varprop)
    torch.manual_seed(0)
