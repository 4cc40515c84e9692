"""What torchvision needs declared to be imported beside the CPU build of torch."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def declare_torchvision() -> None:
    """Declare two operators, to which its import adds; its compiled ones do not load."""
    if find_spec("torchvision") is None:
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
