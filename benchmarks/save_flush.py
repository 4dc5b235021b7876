"""Time of a save with and without flushing it to the disk, in alternation.

    python benchmarks/save_flush.py --folder /scratch --sizes 10,100,1000 --rounds 5

Each save writes one file of the given size (in MB) with `storage.new_folder`, which also computes its checksum.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from camshaft import storage


def save(folder: Path, data: bytes, flush: bool) -> float:
    """Write `data` to a new folder, and return the duration in seconds."""
    start = time.perf_counter()
    fsync = mock.patch.object(os, "fsync", os.fsync if flush else lambda _: None)
    with fsync, storage.new_folder(folder, kind="benchmark") as work:
        (work / "data").write_bytes(data)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--sizes", default="10,100,1000", help="file sizes in MB")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        for size in map(int, args.sizes.split(",")):
            data = os.urandom(size * 1_000_000)
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(args.rounds):
                for flush in (False, True):
                    os.sync()
                    times[flush].append(save(root / "step", data, flush))
            without, flushed = (statistics.median(times[flush]) for flush in (False, True))
            print(f"{size:5d} MB: {without:.3f} s without, {flushed:.3f} s with fsync, ratio {flushed / without:.2f}")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
