"""The pyarrow part of `bench shards`. One thread reads batches with `iter_batches`, in file order, and copies each
batch into a contiguous numpy array.

    bench_shards.py write FILE ROWS WIDTH     writes a list<float32> FILE, plain and uncompressed, and FILE.default with
                                              pyarrow's defaults
    bench_shards.py read FILE                 reads FILE once for every line on stdin and prints the seconds as JSON
"""

import json
import sys
import time

import numpy
import pyarrow
import pyarrow.parquet

ROWS_PER_GROUP = 1024


def write(path, rows, width):
    generator = numpy.random.default_rng(0)
    values = generator.standard_normal(rows * width, dtype=numpy.float32)
    table = pyarrow.table({
        "id": pyarrow.array([str(row) for row in range(rows)]),
        "lat": pyarrow.array(generator.uniform(-90, 90, rows)),
        "lon": pyarrow.array(generator.uniform(-180, 180, rows)),
        "embedding": pyarrow.ListArray.from_arrays(numpy.arange(0, rows * width + 1, width, dtype=numpy.int32), values),
    })
    pyarrow.parquet.write_table(table, path, row_group_size=ROWS_PER_GROUP, compression="none", use_dictionary=False)
    pyarrow.parquet.write_table(table, path + ".default", row_group_size=ROWS_PER_GROUP)


def read(path):
    start, on_core = time.perf_counter(), time.process_time()
    file = pyarrow.parquet.ParquetFile(path)
    out, at = None, 0
    for batch in file.iter_batches(batch_size=4096, columns=["lat", "lon", "embedding"], use_threads=False):
        values = batch.column("embedding").flatten().to_numpy(zero_copy_only=False).reshape(batch.num_rows, -1)
        batch.column("lat").to_numpy(), batch.column("lon").to_numpy()
        if out is None:
            out = numpy.empty((4096, values.shape[1]), values.dtype)
        out[:len(values)] = values
        at += len(values)
    assert at == file.metadata.num_rows
    return {"seconds": time.perf_counter() - start, "core_seconds": time.process_time() - on_core}


if sys.argv[1] == "write":
    write(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
else:
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    for _ in sys.stdin:
        print(json.dumps(read(sys.argv[2])), flush=True)
