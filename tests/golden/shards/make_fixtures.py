#!/usr/bin/env python3
"""Makes the files in this folder with pyarrow, Polars and DuckDB.

    python3 -m venv VENV && VENV/bin/pip install pyarrow numpy polars duckdb
    VENV/bin/python tests/golden/shards/make_fixtures.py

All files but `bad_*.parquet` hold the same 64 rows, each with two embeddings of 8 numbers. Every number is a multiple
of 1/32 between -8 and 8, which float16, float32 and float64 represent exactly. `value` in
`tests/data_plane/shards/support.rs` has the same formula as `value` in this script.
"""

from pathlib import Path

import duckdb
import numpy
import polars
import pyarrow
import pyarrow.parquet

FOLDER = Path(__file__).resolve().parent
ROWS, WIDTH = 64, 8


def value(row, index, view):
    return ((row * 37 + index * 11 + view * 5) % 512 - 256) / 32


def embeddings(view, kind):
    return numpy.array([[value(row, index, view) for index in range(WIDTH)] for row in range(ROWS)], dtype=kind)


LATITUDES = [row * 2.5 - 80 for row in range(ROWS)]
LONGITUDES = [row * 5.0 - 170 for row in range(ROWS)]
IDS = ["photo-%d" % row for row in range(ROWS)]
OFFSETS = numpy.arange(0, ROWS * WIDTH + 1, WIDTH)


def arrow_table(make, kind, coordinate=pyarrow.float64()):
    return pyarrow.table({
        "id": IDS,
        "lat": pyarrow.array(LATITUDES).cast(coordinate),
        "lon": pyarrow.array(LONGITUDES).cast(coordinate),
        "embedding": make(embeddings(0, kind).reshape(-1)),
        "embedding_1": make(embeddings(1, kind).reshape(-1)),
    })


def of_lists(values):
    return pyarrow.ListArray.from_arrays(OFFSETS.astype(numpy.int32), values)


def of_large_lists(values):
    return pyarrow.LargeListArray.from_arrays(OFFSETS, values)


def of_fixed_lists(values):
    return pyarrow.FixedSizeListArray.from_arrays(values, WIDTH)


def write_arrow(name, table, **options):
    pyarrow.parquet.write_table(table, FOLDER / name, row_group_size=24, **options)


def main():
    half, single, double = numpy.float16, numpy.float32, numpy.float64
    write_arrow("pyarrow_f16_fixed.parquet", arrow_table(of_fixed_lists, half), compression="none", use_dictionary=False)
    write_arrow("pyarrow_f16_list_zstd.parquet", arrow_table(of_lists, half), compression="zstd")
    write_arrow("pyarrow_f32_list_default.parquet", arrow_table(of_lists, single))
    write_arrow("pyarrow_f32_list_v2_gzip.parquet", arrow_table(of_lists, single), compression="gzip", data_page_version="2.0")
    write_arrow("pyarrow_f32_list_v2_plain.parquet", arrow_table(of_lists, single), compression="none",
                data_page_version="2.0", use_dictionary=False)
    write_arrow("pyarrow_f64_large_list_brotli.parquet", arrow_table(of_large_lists, double, pyarrow.float32()), compression="brotli")
    write_arrow("pyarrow_f32_byte_stream_split.parquet", arrow_table(of_fixed_lists, single), compression="lz4",
                use_dictionary=False, use_byte_stream_split=["embedding.list.element", "embedding_1.list.element"])
    # A page holds only a few numbers, so a list may continue in the next page.
    write_arrow("pyarrow_f32_small_pages.parquet", arrow_table(of_lists, single), data_page_size=64, write_batch_size=5,
                use_dictionary=False, compression="none")
    frame = polars.DataFrame({
        "id": IDS, "lat": LATITUDES, "lon": LONGITUDES,
        "embedding": embeddings(0, single), "embedding_1": embeddings(1, single),
    })
    frame.write_parquet(FOLDER / "polars_f32_array.parquet", row_group_size=24)
    lists = [polars.col(name).cast(polars.List(polars.Float64)) for name in ("embedding", "embedding_1")]
    frame.with_columns(lists).write_parquet(FOLDER / "polars_f64_list_snappy.parquet", compression="snappy")
    connection = duckdb.connect()
    connection.register("source", arrow_table(of_lists, single))
    target = FOLDER / "duckdb_f32_list.parquet"
    connection.execute(f"COPY (SELECT * FROM source) TO '{target}' (FORMAT parquet, COMPRESSION zstd)")
    target = FOLDER / "duckdb_f64_list_v2.parquet"
    connection.execute(
        "COPY (SELECT id, lat::FLOAT AS lat, lon::FLOAT AS lon, embedding::DOUBLE[] AS embedding,"
        f" embedding_1::DOUBLE[] AS embedding_1 FROM source) TO '{target}' (FORMAT parquet, PARQUET_VERSION v2)")
    # Each `bad_*` file has one bad row, except `bad_no_rows.parquet`, which has no rows.
    nulls = embeddings(0, single).tolist()
    nulls[5] = None
    ragged = embeddings(0, single).tolist()
    ragged[7] = ragged[7][:3]
    element = embeddings(0, single).tolist()
    element[9][4] = None
    for name, lists in (("bad_null_list", nulls), ("bad_ragged_list", ragged), ("bad_null_number", element)):
        table = pyarrow.table({"id": IDS, "lat": LATITUDES, "lon": LONGITUDES, "embedding": lists})
        table = table.set_column(3, "embedding", table["embedding"].cast(pyarrow.list_(pyarrow.float32())))
        write_arrow(name + ".parquet", table)
    huge = embeddings(0, single)
    huge[11, 2] = 70000.0
    table = pyarrow.table({"lat": LATITUDES, "lon": LONGITUDES, "embedding": of_lists(huge.reshape(-1))})
    write_arrow("bad_beyond_float16.parquet", table)
    latitudes = [91.0 if row == 30 else latitude for row, latitude in enumerate(LATITUDES)]
    table = pyarrow.table({"lat": latitudes, "lon": LONGITUDES, "embedding": of_lists(embeddings(0, single).reshape(-1))})
    write_arrow("bad_latitude.parquet", table)
    empty = arrow_table(of_lists, single).slice(0, 0)
    write_arrow("bad_no_rows.parquet", empty)


if __name__ == "__main__":
    main()
