"""Rate and memory of `recmodels prepare` on generated events.

    python packages/recmodels/benchmarks/bench_prepare.py
    python packages/recmodels/benchmarks/bench_prepare.py --events 200_000_000
    python packages/recmodels/benchmarks/bench_prepare.py --format csv --text-ids --k-core 5

The events are those of a log: in order of time, the users mixed, which is the hard case (a file
sorted by user needs no sorting). They are generated in pieces, and `prepare` runs in a process of
its own, whose peak resident memory is reported; memory-mapped pages of the finished store count
there too.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

import recmodels

_PIECE = 5_000_000
_TICKS_PER_EVENT_AND_USER = 1_000_000  # a user has an event every 12 days on average
_GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> None:
    """Generates, prepares and prints."""
    options = _parse(arguments)
    num_users = options.users or max(options.events // 200, 10)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        path = Path(folder) / f"events.{options.format}"
        context = multiprocessing.get_context("spawn")
        # A process each: a new process inherits the peak memory of the one that starts it.
        with concurrent.futures.ProcessPoolExecutor(
            1, mp_context=context, max_tasks_per_child=1
        ) as pool:
            started = time.perf_counter()
            sizes = (options.events, num_users, options.items)
            pool.submit(generate, path, *sizes, text_ids=options.text_ids).result()
            generate_s = time.perf_counter() - started
            result = pool.submit(measure, path, Path(folder) / "store", options.k_core).result()
        result |= {"generate_s": generate_s, "input_bytes": path.stat().st_size}
    result |= {"text_ids": options.text_ids, "k_core": options.k_core, "format": options.format}
    result |= {"polars": pl.__version__, "numpy": np.__version__, "num_cpus": os.cpu_count()}
    _print(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def generate(
    path: Path, num_events: int, num_users: int, num_items: int, *, text_ids: bool
) -> None:
    """Writes a log with the columns user, item and time, in order of time.

    Args:
      path: file to write, parquet or csv by its ending.
      num_events: rows.
      num_users: users, each as likely as any other.
      num_items: size of the catalog; popularity follows Zipf's law.
      text_ids: whether ids are words such as `user-0000123`, not integers.
    """
    rng = np.random.default_rng(0)
    pieces = []
    step = max(_TICKS_PER_EVENT_AND_USER // num_users, 1)
    for start in range(0, num_events, _PIECE):
        size = min(_PIECE, num_events - start)
        rank = np.exp(rng.random(size) * np.log(num_items)).astype(np.int64)
        columns = {
            "user": rng.integers(0, num_users, size) * 13 + 5,
            "item": rank * 2_654_435_761 % 2**40,  # sparse, and unrelated to popularity
            "time": 1_600_000_000 + (np.arange(start, start + size) * step) // 2,
        }
        frame = pl.DataFrame(columns)
        if text_ids:
            frame = frame.with_columns(
                pl.format("{}-{}", pl.lit(name), pl.col(name)).alias(name)
                for name in ("user", "item")
            )
        pieces.append(path.with_name(f"piece-{len(pieces)}.parquet"))
        frame.write_parquet(pieces[-1], compression="lz4")
    table = pl.scan_parquet(pieces)
    if path.suffix == ".csv":
        table.sink_csv(path)
    else:
        table.sink_parquet(path, compression="lz4")
    for piece in pieces:
        piece.unlink()


def measure(path: Path, out: Path, k_core: int) -> dict[str, float]:
    """Prepares the file in this process; returns sizes, seconds and bytes."""
    before = _peak_bytes()
    started, started_cpu = time.perf_counter(), time.process_time()
    report = recmodels.prepare(
        path, out, format=path.suffix[1:], user="user", item="item", time="time", k_core=k_core,
        progress=sys.stderr.isatty(),
    )  # fmt: skip
    prepare_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    num_events = report.num_interactions + sum(report.skipped.values())
    return {
        "num_events": num_events,
        "num_users": report.num_users,
        "num_items": report.num_items,
        "num_interactions": report.num_interactions,
        "prepare_s": prepare_s,
        "cpu_s": cpu_s,
        "events_per_s": num_events / prepare_s,
        "import_bytes": before,
        "peak_bytes": _peak_bytes(),
        "store_bytes": sum(file.stat().st_size for file in out.iterdir()),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=20_000_000, metavar="N")
    parser.add_argument("--users", type=int, metavar="N", help="default: a user per 200 events")
    parser.add_argument("--items", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--format", choices=("parquet", "csv"), default="parquet")
    parser.add_argument("--text-ids", action="store_true", help="words instead of integers")
    parser.add_argument("--k-core", type=int, default=0, metavar="K")
    parser.add_argument("--work", type=Path, help="where to make temporary files")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    return parser.parse_args(arguments)


def _print(result: dict[str, float]) -> None:
    ids = "text" if result["text_ids"] else "integers"
    print(
        f"{result['num_events']:,} events, {result['num_users']:,} users, "
        f"{result['num_items']:,} items; {result['format']} of "
        f"{result['input_bytes'] / _GIB:.2f} GiB, ids {ids}, k-core {result['k_core']}\n"
        f"generated in {result['generate_s']:.0f} s, prepared in {result['prepare_s']:.0f} s "
        f"({result['cpu_s']:.0f} s of CPU): {result['events_per_s']:,.0f} events/s\n"
        f"peak memory {result['peak_bytes'] / _GIB:.2f} GiB, of which "
        f"{result['import_bytes'] / _GIB:.2f} before the start; store of "
        f"{result['store_bytes'] / _GIB:.2f} GiB"
    )


if __name__ == "__main__":
    main()
