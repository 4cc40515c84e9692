"""The kinds of prediction, in a file that a shell can import in no time."""

from enum import Enum


class Task(str, Enum):
    """What is predicted: classes or numbers."""

    auto = "auto"
    regression = "regression"
    classification = "classification"
