"""How fast one and two processes read JPEG images, each on a core of its own.

    python -m experiments.reading_rates [--images=256] [--rounds=5]

`image_folder` beside tf.data by hand and grain, where it is installed. In turn
they read a pass, by one process, then by two with half of the images each.
Nothing is trained. Told are images per second, by the clock and by processor
time, the rate of two processes over that of one, and the rate of `image_folder`
over the others.
Hardware: two free cores; five minutes. Expected: two processes read at least
1.8 times as fast as one, and `image_folder` reads as fast as the better other.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from experiments.input_growth import BATCH, SIDE, make

WORKERS = 2
# A thread that waits for another one can idle for as long as it works.
CLOCKS = "clock", "processor time"
# Each file is read as often in a pass, since making images is slow, and what
# the begin of a pass takes is no part of a rate.
TIMES = 16
ROOT = pathlib.Path(__file__).parents[1]


def by_hand(folder, index, workers):
    """Batches as a tutorial of tf.data reads them."""
    import tensorflow as tf

    def decode(path, label):
        image = tf.io.decode_jpeg(tf.io.read_file(path), 3)
        image = tf.ensure_shape(image, [SIDE, SIDE, 3])
        return tf.cast(image, tf.float32) / 255, label

    files = files_of(folder)
    labels = [int("/b/" in file) for file in files]
    dataset = tf.data.Dataset.from_tensor_slices((files, labels))
    dataset = dataset.shuffle(len(files), seed=1).shard(workers, index)
    dataset = dataset.map(decode, num_parallel_calls=1)
    return (
        dataset.batch(BATCH // workers).prefetch(2).with_options(one_thread())
    )


def image_folder(folder, index, workers):
    """Batches as `Trainer.fit` reads them."""
    import tensorflow as tf

    from mgpu_tf import data, datasets
    from mgpu_tf.datasets.random_access import RandomAccess, Table
    from mgpu_tf.strategies.replicas.topology import LocalReplicas

    found = datasets.image_folder(str(folder), image_size=(SIDE, SIDE))
    table = [tf.tile(column, [TIMES]) for column in found.source.arrays]
    found = RandomAccess(Table(tuple(table), len(table[0])), found.map)
    source = data.RandomAccessSource(found, BATCH, True, 0)
    local = LocalReplicas(index, 1, workers)
    passed = source.pass_from(0, local, 0).prefetch(2)
    return passed.with_options(one_thread())


def grain(folder, index, workers):
    """Batches of grain's own, decoded by Pillow."""
    import grain
    import numpy as np
    from PIL import Image

    def decode(path):
        return np.asarray(Image.open(path), np.float32) / 255

    source = grain.MapDataset.source(files_of(folder)).shuffle(seed=1)
    return source[index::workers].map(decode).batch(BATCH // workers)


READERS = {read.__name__: read for read in (image_folder, by_hand, grain)}


def files_of(folder):
    """Returns the paths, each several times."""
    return sorted(str(p) for p in pathlib.Path(folder).glob("*/*.jpg")) * TIMES


def one_thread():
    """Returns options that keep a pipeline to one thread."""
    import tensorflow as tf

    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    return options


def serve(name, folder, index):
    """Reads a pass for each line, which gives the number of processes."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
    batches = {
        n: READERS[name](folder, min(index, n - 1), n) for n in (1, WORKERS)
    }
    for line in sys.stdin:
        begun = time.perf_counter(), time.process_time()
        for _ in batches[int(line)]:
            pass
        ended = time.perf_counter(), time.process_time()
        seconds = [b - a for a, b in zip(begun, ended, strict=True)]
        print(json.dumps(seconds), flush=True)


class Process:
    """A reader that waits for its turn."""

    def __init__(self, name, folder, index):
        command = [sys.executable, "-m", "experiments.reading_rates"]
        self._process = subprocess.Popen(
            [*command, f"--serve={name}", f"--folder={folder}"]
            + [f"--index={index}"],
            cwd=ROOT,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, workers):
        self._process.stdin.write(f"{workers}\n")
        self._process.stdin.flush()

    def seconds(self):
        """Returns the seconds of a pass, by the clock and of the processor."""
        return json.loads(self._process.stdout.readline())

    def end(self):
        self._process.stdin.close()
        self._process.wait()


def turn(processes, images):
    """Returns the images per second of processes that read a pass together.

    By the clock, and by the processor time of the slowest of them.
    """
    for process in processes:
        process.begin(len(processes))
    seconds = zip(*(process.seconds() for process in processes), strict=True)
    return [images / max(each) for each in seconds]


def run(names, images, rounds):
    """Returns the rates of each reader, of one process and of two."""
    rates = {name: {1: [], WORKERS: []} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        make(folder, images)
        images *= TIMES
        readers = {
            name: [Process(name, folder, index) for index in range(WORKERS)]
            for name in names
        }
        for number in range(rounds + 1):
            for name, processes in readers.items():
                for count, found in rates[name].items():
                    rate = turn(processes[:count], images)
                    if number:  # What is made once is no part of a rate.
                        found.append(rate)
        for processes in readers.values():
            for process in processes:
                process.end()
    return rates


def told(ratios):
    """Returns the median, with the least and the greatest."""
    low, high = min(ratios), max(ratios)
    return f"{statistics.median(ratios):.2f} ({low:.2f} - {high:.2f})"


def over(own, others):
    """Returns the ratios within rounds."""
    return [a / b for a, b in zip(own, others, strict=True)]


def tell(rates):
    """Prints the rates of each reader, and those of the first over others."""
    for name, found in rates.items():
        one, two = (statistics.median(found[n]) for n in (1, WORKERS))
        print(
            f"{name}: {one:.0f} images/s by one process, {two:.0f} by two: "
            f"{told(over(found[WORKERS], found[1]))} times"
        )
    first, *others = rates
    for name in others:
        for count in (1, WORKERS):
            ratios = over(rates[first][count], rates[name][count])
            print(f"{first} / {name}, {count} processes: {told(ratios)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    for name in ("--serve", "--folder", "--index"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.folder, int(arguments.index))
        return
    names = [n for n in READERS if n != "grain" or importlib.util.find_spec(n)]
    if "grain" not in names:
        print("grain is left out: pip install grain pillow")
    rates = run(names, arguments.images, arguments.rounds)
    for kind, clock in enumerate(CLOCKS):
        print(f"By the {clock}:")
        kept = {
            name: {n: [rate[kind] for rate in found[n]] for n in found}
            for name, found in rates.items()
        }
        tell(kept)


if __name__ == "__main__":
    main()
