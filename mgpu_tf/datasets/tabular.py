"""A generated table: 10,000 rows of 20 numbers, in ten classes.

Each class is made of clusters at the corners of a hypercube, so that a small
network learns it and a linear one does not; 8,000 rows to train and 2,000 to
test.

References:
    I. Guyon: Design of experiments for the NIPS 2003 variable selection
    benchmark, 2003, as scikit-learn's `make_classification` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

ROWS = 10_000
COLUMNS = 20
CLASSES = 10
_TEST_ROWS = 2_000


class Tabular(tfds.core.GeneratorBasedBuilder):
    """Builder of the set; nothing is downloaded."""

    VERSION = tfds.core.Version("1.0.0")
    NUM_SHARDS = 4
    IN_MEMORY = True
    SCALE = 1.0

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="A generated table with ten classes.",
            features=tfds.features.FeaturesDict(
                {
                    "columns": tfds.features.Tensor(
                        shape=(COLUMNS,), dtype=np.float32
                    ),
                    "label": tfds.features.ClassLabel(num_classes=CLASSES),
                }
            ),
            supervised_keys=("columns", "label"),
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager
        from sklearn.datasets import make_classification

        x, y = make_classification(
            ROWS,
            COLUMNS,
            n_informative=12,
            n_redundant=4,
            n_classes=CLASSES,
            n_clusters_per_class=2,
            class_sep=2.0,
            random_state=0,
        )
        # Standardized, as a network wants its inputs.
        x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
        first = ROWS - _TEST_ROWS
        return {
            "train": self._generate_examples(x[:first], y[:first]),
            "test": self._generate_examples(x[first:], y[first:]),
        }

    def _generate_examples(
        self, x: np.ndarray, y: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, (row, label) in enumerate(zip(x, y, strict=True)):
            yield key, {"columns": row, "label": int(label)}
