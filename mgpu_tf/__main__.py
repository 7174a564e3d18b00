"""`python -m mgpu_tf`, the same as `mgpu-tf`."""

import sys

from mgpu_tf.cli import main

if __name__ == "__main__":
    sys.exit(main())
