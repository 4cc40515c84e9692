"""Tables are read the same in parts as whole, however they are written."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from varprop.table.columns import numbers
from varprop.table.encoding import Encoder
from varprop.table.layout import Layout
from varprop.table.messages import TableError
from varprop.table.reading import chunks


def read(path: Path, types: dict[str, str] | None = None) -> pd.DataFrame:
    """A whole table."""
    return pd.concat(chunks(path, types))


@pytest.fixture
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "town": rng.choice(["Ulm", "Köln", "a,b", "c;d", '"quoted"', "two\nlines"], 200),
            "area": rng.gamma(3.0, 10.0, 200).round(2),
            "rooms": rng.integers(1, 6, 200).astype(float),
        }
    )
    frame.loc[::7, "town"] = None
    frame.loc[::5, "rooms"] = None
    return frame


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("typed", [False, True])
def test_formats_and_parts_agree(table: pd.DataFrame, tmp_path: Path, ending: str, typed: bool) -> None:
    path = tmp_path / f"data.{ending}"
    if ending == "parquet":
        table.to_parquet(path, row_group_size=64)
    else:
        table.to_csv(path, index=False, sep="," if ending == "csv" else "\t")
        assert Layout.of(path).notes == ()
    encoder = Encoder.fit(read(path))
    expected = Encoder.fit(table).transform(table)
    parts = list(chunks(path, encoder.types if typed else None, rows=33))
    assert [len(part) for part in parts][:-1] == [33] * (len(parts) - 1) or ending == "parquet"
    np.testing.assert_allclose(np.vstack([encoder.transform(part) for part in parts]), expected, rtol=1e-6)
    assert parts[1].index[0] == len(parts[0]) + 1


def test_parquet_is_recognised_under_any_name(table: pd.DataFrame, tmp_path: Path) -> None:
    table.to_parquet(tmp_path / "data")
    pd.testing.assert_frame_equal(read(tmp_path / "data").reset_index(drop=True), table, check_dtype=False)


@pytest.mark.parametrize("types", [None, {"b": "float64", "a": "str"}])
def test_spaces_around_the_names_of_columns_do_not_count(
    tmp_path: Path, types: dict[str, str] | None
) -> None:
    path = tmp_path / "data.csv"
    path.write_text("a , b,y, a\n1,2,3,4\n5,6,7,8\n")
    assert Layout.of(path).header == ("a", "b", "y", "a")
    found = read(path, types)
    assert list(found) == ["a", "b", "y"] if types is None else list(types)
    assert found["a"].tolist() == ["1", "5"]
    assert found["b"].astype(float).tolist() == [2.0, 6.0]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("decimal", [".", ","])
def test_layouts_are_recognised(
    table: pd.DataFrame, tmp_path: Path, encoding: str, separator: str, decimal: str
) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(table.to_csv(index=False, sep=separator, decimal=decimal).encode(encoding))
    layout = Layout.of(path)
    assert (layout.separator, layout.decimal) == (separator, decimal)
    expected = table.astype({"town": str}).where(table.notna())
    types = {"town": "str", "area": "float64", "rooms": "float64"}
    pd.testing.assert_frame_equal(read(path, types).reset_index(drop=True), expected, check_dtype=False)
    assert read(path)["area"].astype(float).tolist() == table["area"].tolist()


def test_what_is_unusual_is_said(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes("größe;y;y\n1,5;2;3\n".encode("latin-1"))
    assert Layout.of(path).notes == (
        "in Latin-1",
        "separated by semicolons",
        "with decimal commas",
        "with the name 'y' twice in its header; the first column of it counts",
    )
    assert read(path).to_dict("list") == {"größe": ["1.5"], "y": ["2"]}
    assert read(path, {"y": "str"}).to_dict("list") == {"y": ["2"]}


@pytest.mark.parametrize(
    ("fields", "decimal"),
    [
        (["1,5", "2"], ","),
        (["1,234", "2,345"], ","),  # with semicolons, commas are decimal
        (["1,234", "2.5"], "."),
        (["1,234,567", "2"], "."),
        (["1.234,5", "1.234"], ","),
        (["Ulm, Köln", "2"], "."),
    ],
)
def test_decimal_commas_or_thousands(tmp_path: Path, fields: list[str], decimal: str) -> None:
    (tmp_path / "data.csv").write_text("a;b\n" + "".join(f"{field};1\n" for field in fields))
    assert Layout.of(tmp_path / "data.csv").decimal == decimal


def test_points_are_thousands_beside_decimal_commas(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a;b\n1.234,5;x\n1.234;1,5 m\n2,5;z\n")
    expected = {"a": [1234.5, 1234.0, 2.5], "b": ["x", "1,5 m", "z"]}
    table = read(tmp_path / "data.csv", {"a": "float64", "b": "str"})
    assert {"a": numbers(table["a"]).tolist(), "b": table["b"].tolist()} == expected


def test_quoted_thousands_and_percents_reach_numbers_in_typed_columns(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text('price,rate\n"36,953",49.8%\n12,3%\n15,4%\n')
    encoder = Encoder.fit(read(tmp_path / "data.csv"))
    rows = read(tmp_path / "data.csv", encoder.types)
    np.testing.assert_array_equal(encoder.coded(rows), [[36953, 49.8], [12, 3], [15, 4]])


def test_text_is_literal_but_for_empty_fields(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("y,x\nNone,1\nNA,NA\n,2\nnull,\n")
    table = read(tmp_path / "data.csv", {"y": "str", "x": "float64"})
    assert table["y"].tolist()[:2] == ["None", "NA"]
    assert table["y"].isna().tolist() == [False, False, True, False]
    assert table["x"].isna().tolist() == [False, True, False, True]


def test_compressed_text(table: pd.DataFrame, tmp_path: Path) -> None:
    path = tmp_path / "data.csv.gz"
    path.write_bytes(gzip.compress(table.to_csv(index=False, sep=";").encode()))
    assert list(read(path)) == list(table)
    (tmp_path / "bad.gz").write_bytes(b"a,b\n1,2\n")
    with pytest.raises(TableError, match="cannot be unpacked"):
        read(tmp_path / "bad.gz")


def test_unused_columns_are_left_out(table: pd.DataFrame, tmp_path: Path) -> None:
    table.to_csv(tmp_path / "data.csv", index=False)
    assert list(read(tmp_path / "data.csv", {"rooms": "float64", "area": "float64"})) == ["rooms", "area"]
    with pytest.raises(TableError, match=r"has no column 'x'; it has 'town', 'area', 'rooms'\."):
        read(tmp_path / "data.csv", {"x": "str"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "No columns"),
        (b"a,b\n", "has no rows"),
        (b"a,b\n1,2\n3,4,5\n", "Expected 2 fields in line 3, saw 3"),
        (b"a,b\n1,2,3\n4,5,6\n", "Expected 2 fields in line 2, saw 3"),
        (b"PK\x03\x04" + bytes(range(256)), "is an Excel workbook or an archive; save the table as CSV"),
        (b"\x7fELF\0\0\0\1\2\3\0\0" * 9, "is not text; save the table as CSV"),
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


def test_an_odd_byte_far_down_makes_the_file_latin(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_bytes(b"a,b\n" + b"1,x\n" * 100_000 + b"2,\xe9\n")
    table = read(tmp_path / "data.csv", {"b": "str"})
    assert table["b"].iloc[-1] == "é"


def test_a_wrong_value_far_down_is_named_with_its_row(table: pd.DataFrame, tmp_path: Path) -> None:
    encoder = Encoder.fit(table)
    text = table.astype(object)
    text.loc[150, "area"] = "large"
    text.to_csv(tmp_path / "data.csv", index=False)
    with pytest.raises(TableError, match="column 'area' has 'large' in row 151"):
        [encoder.transform(part) for part in chunks(tmp_path / "data.csv", encoder.types, rows=40)]
