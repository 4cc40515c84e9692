"""Reports: one self-contained HTML page on how a model does."""

from .page import report

__all__ = ["report"]
