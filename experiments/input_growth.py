"""What a worker reads, decodes and waits for, against the number of workers.

    python experiments/input_growth.py [--images=512] [--out=docs/growth.md]

Makes JPEG images in a temporary folder. For 1, 2, 4 and 8 workers it is the
first of them, with one thread, and reads a pass as `Trainer.fit` does: files
and bytes that it read, images that it decoded, the time of its processor. Then
it resumes at three quarters of the pass, up to its first batch. What 64 to
4,096 workers read is computed from that.
Hardware: any; expected on 2 CPU cores: three minutes. No training runs.
"""

import argparse
import collections
import json
import math
import pathlib
import tempfile
import time

BATCH, SIDE = 64, 224
# Each file comes so often in a pass: making images takes longer than reading.
TIMES = 4
WORKERS = (1, 2, 4, 8)
MODELLED = (64, 512, 4096)
KINDS = {
    "by_hand": "tf.data by hand",
    "whole": "a dataset that is not cut",
    "cut": "a dataset, cut before its map",
    "by_number": "`image_folder`",
}
ROOT = pathlib.Path(__file__).parents[1]


def make(folder, images):
    """Writes images that take as long to decode as photographs."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(0)
    for number in range(images):
        coarse = generator.uniform(0, 255, (14, 14, 3))
        image = tf.image.resize(coarse, (SIDE, SIDE), "bicubic")
        image += generator.normal(0, 8, image.shape)
        image = tf.saturate_cast(image, tf.uint8)
        name = pathlib.Path(folder) / "ab"[number % 2]
        name.mkdir(exist_ok=True)
        data = tf.io.encode_jpeg(image, quality=90).numpy()
        (name / f"{number:06d}.jpg").write_bytes(data)


def source_of(kind, folder, counts):
    """Returns what a worker of `Trainer.fit` reads from."""
    import tensorflow as tf

    from mgpu_tf import data, datasets
    from mgpu_tf.datasets.random_access import RandomAccess, Table

    def count(path):
        counts["files"] += 1
        counts["bytes"] += pathlib.Path(path.decode()).stat().st_size
        return path

    def decode(path):
        # Whether tf.data may count on the same result of each call.
        path = tf.numpy_function(
            count, [path], tf.string, stateful=kind == "whole"
        )
        image = tf.io.decode_jpeg(tf.io.read_file(path), 3)
        image = tf.ensure_shape(image, [SIDE, SIDE, 3])
        return tf.cast(image, tf.float32) / 255

    if kind == "by_number":
        found = datasets.image_folder(folder, image_size=(SIDE, SIDE))
        paths = tf.tile(found.source.arrays[0], [TIMES])
        found = RandomAccess(Table(paths, len(paths)), decode)
        return data.RandomAccessSource(found, BATCH, True, 0)
    files = sorted(str(p) for p in pathlib.Path(folder).glob("*/*.jpg"))
    dataset = tf.data.Dataset.from_tensor_slices(files * TIMES)
    dataset = dataset.shuffle(len(files) * TIMES, seed=1)
    dataset = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(BATCH).prefetch(2)
    if kind == "by_hand":
        return dataset
    return data.DatasetSource(dataset, early=True)


def measure(kind, folder, workers):
    """Reads a pass and resumes; returns what it took."""
    import tensorflow as tf

    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    from mgpu_tf.strategies.replicas.topology import LocalReplicas

    local = LocalReplicas(0, 1, workers)
    counts = collections.Counter()
    source = source_of(kind, folder, counts)

    def read(start):
        if kind == "by_hand":
            return source.skip(start).with_options(options)
        return source.pass_from(0, local, start).with_options(options)

    # What is made once in a run is no part of the rate.
    whole = read(0)
    next(iter(whole))
    time.sleep(1)
    counts.clear()
    begun = time.process_time()
    batches = sum(1 for _ in whole)
    seconds = time.process_time() - begun
    found = {"kind": kind, "workers": workers, "seconds": seconds, **counts}
    # Again from the beginning, as a new process would.
    resumed = source_of(kind, folder, counts)
    counts.clear()
    source = resumed
    begun = time.process_time()
    next(iter(read(batches * 3 // 4)))
    found["resume_seconds"] = time.process_time() - begun
    found["resume_files"] = counts["files"]
    return found


def run(images):
    """Measures all kinds, one after the other."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make(folder, images)
        found = []
        for kind in KINDS:
            for workers in WORKERS if kind != "by_hand" else (1,):
                found.append(measure(kind, folder, workers))
                print(json.dumps(found[-1]), flush=True)
    return found


def rows_of(measured):
    """Returns the lines of the table."""
    alone = {m["kind"]: m for m in measured if m["workers"] == 1}
    for kind, name in KINDS.items():
        for m in (m for m in measured if m["kind"] == kind):
            times = alone[kind]["seconds"] / m["seconds"]
            yield (
                f"| {name} | {m['workers']} | {m['files']:,} "
                f"| {m['bytes'] / 1e6:.1f} | {m['seconds']:.2f} "
                f"| {times:.2f} "
                f"| {m['resume_files']:,} | {m['resume_seconds']:.2f} |"
            )


def modelled(measured):
    """Returns the lines of the table of what is computed."""
    [one] = [m for m in measured if m["kind"] == "cut" and m["workers"] == 1]
    size = one["bytes"] / one["files"]
    total = 10_000_000
    for workers in MODELLED:
        batch = BATCH * workers
        batches = math.ceil(total / batch)
        own = math.ceil(total / workers)
        yield (
            f"| {workers:,} | {batches:,} | {total:,} "
            f"| {total * size / 1e9:,.0f} | {own:,} "
            f"| {own * size / 1e9:,.2f} |"
        )


def written(page, measured):
    """Returns the text of a page with its two tables made anew."""
    for name, lines in (
        ("measured", rows_of(measured)),
        ("computed", modelled(measured)),
    ):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        table, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"The page must have {begin.strip()} and {end}.")
        head = "\n".join(table.strip().splitlines()[:2])
        table = "\n".join([head, *lines])
        page = f"{before}{begin}\n{table}\n\n{end}{after}"
    return page


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--out", default=str(ROOT / "docs" / "growth.md"))
    arguments = parser.parse_args()
    page = pathlib.Path(arguments.out)
    page.write_text(written(page.read_text(), run(arguments.images)))


if __name__ == "__main__":
    main()
