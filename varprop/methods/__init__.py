"""How activations travel through a network: one table of rules for each method."""

from .base import Method, NoRuleError
from .cvbp import CVBP
from .deterministic import DETERMINISTIC
from .dvi import DVI
from .local_reparam import LOCAL_REPARAM
from .pbp import PBP
from .vbp import VBP, vbp

METHODS = {
    "cvbp": CVBP,
    "vbp": VBP,
    "dvi": DVI,
    "local_reparam": LOCAL_REPARAM,
    "deterministic": DETERMINISTIC,
    "pbp": PBP,
}

__all__ = [
    "CVBP",
    "DETERMINISTIC",
    "DVI",
    "LOCAL_REPARAM",
    "METHODS",
    "PBP",
    "VBP",
    "Method",
    "NoRuleError",
    "vbp",
]
