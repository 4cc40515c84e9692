"""The plain network: every weight at its mean."""

from __future__ import annotations

from torch import nn

from .base import Method, as_it_is

DETERMINISTIC = Method("DETERMINISTIC", {nn.Module: as_it_is}, deterministic=True, key="deterministic")
