"""What is predicted: classes or numbers, one column or several, and rows without it."""

import numpy as np
import pandas as pd
import pytest

from varprop.table.columns import is_numeric
from varprop.table.messages import TableError
from varprop.table.target import TargetColumn, guess_task, with_target
from varprop.table.task import Task


@pytest.mark.parametrize(
    ("values", "numeric"),
    [
        (["1", " 2e3", None], True),
        (["1", "x"], False),
        (["true", "false"], False),
        (["1", "inf"], True),
        ([True, False], False),
        ([True, False, None], False),
        (["36,953", "4%"], True),
        (["1", "?"], True),
        (["?", None], False),
    ],
)
def test_what_counts_as_a_number(values: list[object], numeric: bool) -> None:
    assert is_numeric(pd.Series(values)) is numeric


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (["a", "b"], Task.classification),
        (["0", "1", "1"], Task.classification),
        (["0.5", "1", "1"], Task.regression),
        (range(30), Task.regression),
        ([-1, 1], Task.classification),
        ([2, 4, 2], Task.classification),
        ([3, 4, 5, 6, 7, 8], Task.classification),
        ([1, 2, 3, 5, 6, 7], Task.classification),
        ([1000, 2000, 5000], Task.regression),
        ([0, 50, 100], Task.regression),
        ([2019, 2020, 2021], Task.regression),
        ([True, False], Task.classification),
    ],
)
def test_what_auto_takes_for_classes(values: object, task: Task) -> None:
    assert guess_task(pd.Series(values)) is task


def test_classes_are_in_numeric_order() -> None:
    assert TargetColumn.fit(pd.DataFrame({"y": ["10", "9", "x"]}), ["y"]).classes == ["9", "10", "x"]


def test_a_word_in_a_column_of_numbers_does_not_make_them_classes() -> None:
    table = pd.DataFrame({"price": [*(f"{i}.5" for i in range(20)), "high"]}, index=range(1, 22))
    with pytest.raises(TableError, match="'price', the target, has numbers, but 'high' in row 21"):
        TargetColumn.fit(table, ["price"])
    assert len(TargetColumn.fit(table, ["price"], Task.classification).classes or ()) == 21


def test_rows_without_a_target_are_left_out() -> None:
    table = pd.DataFrame({"y": ["1.5", None, "NA", "2.5", "?", ""]})
    assert with_target(table, ["y"]).index.tolist() == [0, 3]
    names = pd.DataFrame({"y": ["None", "NA", None, "null", "a"]})
    assert with_target(names, ["y"]).index.tolist() == [0, 1, 3, 4]
    assert TargetColumn.fit(with_target(names, ["y"]), ["y"]).classes == ["NA", "None", "a", "null"]
    assert with_target(table, ["y"], Task.classification).index.tolist() == [0, 2, 3, 4]
    with pytest.raises(TableError, match="no row has a value of 'y'"):
        TargetColumn.fit(with_target(table.iloc[1:2], ["y"]), ["y"])


def test_several_targets_are_numbers() -> None:
    table = pd.DataFrame({"a": ["1", "2", ""], "b": ["3", "4", "5"], "c": list("xyz")})
    complete = with_target(table, ["a", "b"])
    target = TargetColumn.fit(complete, ["a", "b"])
    assert (target.name, target.classes) == ("a, b", None)
    np.testing.assert_array_equal(target.values(complete), [[1, 3], [2, 4]])
    assert TargetColumn.from_json(target.to_json()) == TargetColumn(["a", "b"])
    with pytest.raises(TableError, match="column 'c' has 'x' in row 0, where a finite number is needed"):
        TargetColumn.fit(complete, ["a", "c"])
    with pytest.raises(TableError, match="one target only"):
        TargetColumn.fit(complete, ["a", "b"], Task.classification)


def test_targets_of_earlier_versions() -> None:
    assert TargetColumn.from_json({"name": "y", "classes": ["a", "b"]}).names == ["y"]


def test_values_that_the_target_cannot_have() -> None:
    with pytest.raises(TableError, match="has no value in row 1"):
        TargetColumn(["y"]).values(pd.DataFrame({"y": ["1", None]}))
    with pytest.raises(TableError, match=r"'c' in row 0, a class that .* it knows 'a', 'b'\."):
        TargetColumn(["y"], ["a", "b"]).values(pd.DataFrame({"y": ["c"]}))
    with pytest.raises(TableError, match="column 'y' has 1 different value;"):
        TargetColumn.fit(pd.DataFrame({"y": ["a", "a"]}), ["y"])
