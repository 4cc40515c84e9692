"""How activations pass through a network: one table of rules for each method."""

from .base import Call, Method, NoRuleError
from .facts import Rule
from .noise import unexplained
from .tables import CVBP, DETERMINISTIC, DVI, EXACT, LOCAL_REPARAM, METHODS, MOMENTS, PBP, VBP, VRELU, vbp

__all__ = [
    "CVBP",
    "DETERMINISTIC",
    "DVI",
    "EXACT",
    "LOCAL_REPARAM",
    "METHODS",
    "MOMENTS",
    "PBP",
    "VBP",
    "VRELU",
    "Call",
    "Method",
    "NoRuleError",
    "Rule",
    "unexplained",
    "vbp",
]
