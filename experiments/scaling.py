"""The sources' scaling table: speed-up on 1, 2, 4 and 8 devices.

    python experiments/scaling.py [--output_dir=runs/scaling]

Hardware: any. With GPUs they are the devices. Without, it runs twice: parts
of the CPU, 1 to 8, which show the overhead of more replicas, and one process
to a core, which is speed-up. Expected on 2 CPU cores: about five minutes; two
processes reached 1.2 of one on the CNN while other work ran, which meets two
cores harder than one. Published beside: 1.7 / 3.5 / 6.2 on 2 / 4 / 8 GPUs, and
TensorFlow's own on a DGX-1.
"""

import argparse
import os
import subprocess
import sys


def benchmark(folder, *flags):
    """Runs `mgpu-tf benchmark`; leaves scaling.json and scaling.png."""
    command = ["benchmark", "--model=cnn", *flags, f"--output_dir={folder}"]
    print(f"$ mgpu-tf {' '.join(command)}", flush=True)
    code = subprocess.call([sys.executable, "-m", "mgpu_tf", *command])
    if code:
        sys.exit(code)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default=os.path.join("runs", "scaling"))
    folder = parser.parse_args().output_dir
    cores = len(os.sched_getaffinity(0))
    benchmark(os.path.join(folder, "devices"), "--devices=1,2,4,8")
    counts = [str(n) for n in (1, 2, 4, 8) if n <= cores]
    benchmark(
        os.path.join(folder, "processes"),
        "--kind=processes",
        f"--devices={','.join(counts)}",
    )


if __name__ == "__main__":
    main()
