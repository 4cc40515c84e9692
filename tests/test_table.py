"""Tables are read the same in parts as whole, and encoded as scikit-learn would."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from varprop.table.columns import is_numeric
from varprop.table.encoding import Encoder
from varprop.table.messages import TableError
from varprop.table.reading import chunks, read


@pytest.fixture
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "town": rng.choice(["Ulm", "Köln", "a,b", '"quoted"'], 200),
            "area": rng.gamma(3.0, 10.0, 200),
            "rooms": rng.integers(1, 6, 200).astype(float),
            "garden": rng.choice(["true", "false"], 200),
            "constant": 3.0,
        }
    )
    frame.loc[::7, "town"] = None
    frame.loc[::5, "rooms"] = None
    return frame


def test_the_encoder_gives_medians_and_indicators(table: pd.DataFrame) -> None:
    numeric = table[["area", "rooms", "constant"]]
    indicators = pd.get_dummies(table[["town", "garden"]].fillna(""), dtype=float)
    indicators.insert(indicators.columns.get_loc("garden_false"), "garden_", 0.0)  # no garden is missing
    expected = np.hstack([numeric.fillna(numeric.median()), indicators])
    encoder = Encoder.fit(table)
    np.testing.assert_array_equal(encoder.transform(table), expected)
    again = Encoder(**json.loads(json.dumps(encoder.to_json())))
    assert again == encoder
    np.testing.assert_array_equal(again.transform(table), encoder.transform(table))


def test_a_graph_encodes_as_the_transformers_do(table: pd.DataFrame) -> None:
    encoder = Encoder.fit(table)
    x = torch.tensor(encoder.coded(table))
    assert x.isnan().any(0).tolist() == [False, True, False, False, False]
    x[x[:, 3] == 0, 3] = torch.nan  # a missing category may be given by its place or as NaN
    assert x[:, 3].isnan().any()
    np.testing.assert_array_equal(encoder.module()(x), encoder.transform(table))
    for wrong in (-1.0, 0.5, 9.0):
        x[:, 3] = wrong
        out = encoder.module()(x)
        places = len(encoder.categories["town"])
        assert out[:, 3 : 3 + places].isnan().all()
        assert not out[:, :3].isnan().any()
        assert not out[:, 3 + places :].isnan().any()


@pytest.mark.parametrize("kinds", [["numeric"], ["text"], ["numeric", "text"]])
def test_the_graph_of_many_columns_is_no_larger(kinds: list[str]) -> None:
    def operations(count: int) -> int:
        table = pd.DataFrame(
            {
                f"{kind} {i}": [1.0, 2.0, None] if kind == "numeric" else ["a", "b", f"c{i}"]
                for kind in kinds
                for i in range(count)
            }
        )
        encoder = Encoder.fit(table)
        module, x = encoder.module(), torch.tensor(encoder.coded(table))
        np.testing.assert_array_equal(module(x), encoder.transform(table))
        return len([node for node in torch.fx.symbolic_trace(module).graph.nodes if node.op != "get_attr"])

    assert operations(1) == operations(50) < 30


def test_every_row_is_encoded_by_itself(table: pd.DataFrame) -> None:
    encoder = Encoder.fit(table)
    rows = np.vstack([encoder.transform(table.iloc[i : i + 1]) for i in range(20)])
    np.testing.assert_array_equal(rows, encoder.transform(table.iloc[:20]))


def test_a_missing_value_where_training_had_none_is_encoded(table: pd.DataFrame) -> None:
    encoder = Encoder.fit(table.dropna())
    assert np.isfinite(encoder.transform(table)).all()


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("typed", [False, True])
def test_formats_and_parts_agree(table: pd.DataFrame, tmp_path: Path, ending: str, typed: bool) -> None:
    path = tmp_path / f"data.{ending}"
    if ending == "parquet":
        table.to_parquet(path, row_group_size=64)
    else:
        table.to_csv(path, index=False, sep="," if ending == "csv" else "\t")
    encoder = Encoder.fit(read(path))
    expected = Encoder.fit(table).transform(table)
    parts = list(chunks(path, encoder.types if typed else None, rows=33))
    assert [len(part) for part in parts][:-1] == [33] * (len(parts) - 1) or ending == "parquet"
    np.testing.assert_allclose(np.vstack([encoder.transform(part) for part in parts]), expected, rtol=1e-6)
    assert parts[1].index[0] == len(parts[0]) + 1


def test_unused_columns_are_left_out(table: pd.DataFrame, tmp_path: Path) -> None:
    table.to_csv(tmp_path / "data.csv", index=False)
    assert list(read(tmp_path / "data.csv", {"rooms": "float64", "area": "float64"})) == ["rooms", "area"]


@pytest.mark.parametrize(
    ("values", "numeric"),
    [
        (["1", " 2e3", None], True),
        (["1", "x"], False),
        (["true", "false"], False),
        (["1", "inf"], True),
        ([True, False], False),
        ([True, False, None], False),
    ],
)
def test_what_counts_as_a_number(values: list[object], numeric: bool) -> None:
    assert is_numeric(pd.Series(values)) is numeric


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "No columns"),
        (b"a,b\n", "has no rows"),
        (b"a,b\n1,2\n3,4,5\n", "Expected 2 fields in line 3, saw 3"),
        (b"a,b\n1,2,3\n4,5,6\n", "Expected 2 fields in line 2, saw 3"),
        (b"a,b\n1,\xe9\n", "not UTF-8 text"),
    ],
)
@pytest.mark.parametrize("types", [None, {"a": "float64"}])
def test_files_that_are_no_tables(
    tmp_path: Path, content: bytes, said: str, types: dict[str, str] | None
) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(content)
    with pytest.raises(TableError, match=said):
        read(path, types)


def test_a_wrong_value_far_down_is_named_with_its_row(table: pd.DataFrame, tmp_path: Path) -> None:
    encoder = Encoder.fit(table)
    text = table.astype(object)
    text.loc[150, "area"] = "large"
    text.to_csv(tmp_path / "data.csv", index=False)
    with pytest.raises(TableError, match="column 'area' has 'large' in row 151"):
        [encoder.transform(part) for part in chunks(tmp_path / "data.csv", encoder.types, rows=40)]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (
            [f"id {i}" for i in range(200)],
            r"column 'extra' is text \('id 0' in row 1\) with 200 different values",
        ),
        ([None] * 200, "column 'extra' has no values"),
        (pd.date_range("2020-01-01", periods=200), "column 'extra' holds dates"),
        ([1.0, np.inf] * 100, "column 'extra' has 'inf' in row 2"),
    ],
)
def test_columns_that_cannot_be_learned_from(table: pd.DataFrame, column: object, said: str) -> None:
    table.index = pd.RangeIndex(1, 201)
    table["extra"] = column
    with pytest.raises(TableError, match=said):
        Encoder.fit(table)


def test_a_table_without_columns_is_refused(table: pd.DataFrame) -> None:
    with pytest.raises(TableError, match="no column besides the target"):
        Encoder.fit(table[[]])
