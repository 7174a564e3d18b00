"""The main job: two worker processes and one device, to the same weights.

    python experiments/demo.py          (or: make demo)

Trains scikit-learn's digits on a cluster of two processes on this machine,
then the same job on one device, and prints the largest difference between
any two weights. Hardware: any; on 2 CPU cores about a minute. Expected: test
accuracy about 0.96, largest difference about 1e-6.
"""

import os
import subprocess
import sys
import tempfile

from mgpu_tf.runtime import quiet_import

FLAGS = ["--model=mlp", "--dataset=digits", "--epochs=5"]


def train(folder, *flags):
    """Runs `mgpu-tf train` and returns the folder with its results."""
    command = [sys.executable, "-m", "mgpu_tf", "train", *FLAGS, *flags]
    print(f"$ mgpu-tf train {' '.join([*FLAGS, *flags])}", flush=True)
    code = subprocess.call([*command, f"--output_dir={folder}"])
    if code:
        sys.exit(code)
    return folder


def weights(folder):
    """Returns the weights of a saved model."""
    import keras

    model = keras.saving.load_model(os.path.join(folder, "model.keras"))
    return model.get_weights()


def main():
    with tempfile.TemporaryDirectory() as folder:
        cluster = train(
            os.path.join(folder, "cluster"),
            "--strategy=multi_worker_mirrored",
            "--num_workers=2",
        )
        single = train(os.path.join(folder, "single"), "--strategy=one_device")
        quiet_import.import_tensorflow()
        pairs = zip(weights(cluster), weights(single), strict=True)
        difference = max(float(abs(a - b).max()) for a, b in pairs)
    print(
        "largest difference of any weight, 2 worker processes against one "
        f"device: {difference:.2e}"
    )


if __name__ == "__main__":
    main()
