"""How fast one and two processes read JPEG images, each on a core of its own.

    python -m experiments.reading_rates [--images=256] [--rounds=5]

`image_folder` beside tf.data by hand and grain, where it is installed. In turn
they read a pass, by one process, then by two with half of the images each.
Nothing is trained. Told are images per second, the rate of two
processes over that of one, and the rate of `image_folder` over the others.
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

from experiments.input_growth import BATCH, SIDE, TIMES, make

WORKERS = 2
ROOT = pathlib.Path(__file__).parents[1]


def by_hand(folder, index, workers):
    """Batches as a tutorial of tf.data reads them."""
    import tensorflow as tf

    def decode(path):
        image = tf.io.decode_jpeg(tf.io.read_file(path), 3)
        image = tf.ensure_shape(image, [SIDE, SIDE, 3])
        return tf.cast(image, tf.float32) / 255

    files = files_of(folder)
    dataset = tf.data.Dataset.from_tensor_slices(files)
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
    from mgpu_tf.strategies.topology import LocalReplicas

    found = datasets.image_folder(str(folder), image_size=(SIDE, SIDE))
    table = [tf.tile(column, [TIMES]) for column in found.source.arrays]
    found = RandomAccess(Table(tuple(table), len(table[0])), found.map)
    source = data.RandomAccessSource(found, BATCH, True, 0)
    local = LocalReplicas(index, 1, workers)
    return source.pass_from(0, local, 0).with_options(one_thread())


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
    """Returns the paths, each several times, since making images is slow."""
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
        begun = time.perf_counter()
        for _ in batches[int(line)]:
            pass
        print(json.dumps(time.perf_counter() - begun), flush=True)


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
        return float(self._process.stdout.readline())

    def end(self):
        self._process.stdin.close()
        self._process.wait()


def turn(processes, images):
    """Returns the images per second of processes that read a pass together."""
    for process in processes:
        process.begin(len(processes))
    return images / max(process.seconds() for process in processes)


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
    for name, found in rates.items():
        one, two = (statistics.median(found[n]) for n in (1, WORKERS))
        print(
            f"{name}: {one:.0f} images/s by one process, {two:.0f} by two: "
            f"{told(over(found[WORKERS], found[1]))} times"
        )
    for name in names[1:]:
        for count in (1, WORKERS):
            ratios = over(rates[names[0]][count], rates[name][count])
            print(f"{names[0]} / {name}, {count} processes: {told(ratios)}")


if __name__ == "__main__":
    main()
