"""scikit-learn's handwritten digits as a TFDS builder.

1,797 images of 8 x 8 pixels with 17 shades, ten classes; 1,437 to train and
360 to test, in the same proportion of classes.

References:
    E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI
    Machine Learning Repository, 1998.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_TEST_FRACTION = 0.2
_SPLIT_SEED = 0


class Digits(tfds.core.GeneratorBasedBuilder):
    """Builder of the set; nothing is downloaded."""

    VERSION = tfds.core.Version("1.0.0")
    NUM_SHARDS = 4
    IN_MEMORY = True
    SCALE = 16.0
    """The largest shade; inputs are divided by it."""

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Handwritten digits of 8 x 8 pixels.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Tensor(
                        shape=(8, 8, 1), dtype=np.uint8
                    ),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(
            images.reshape(-1, 8, 8, 1).astype(np.uint8),
            labels,
            test_size=_TEST_FRACTION,
            random_state=_SPLIT_SEED,
            stratify=labels,
        )
        return {
            "train": self._generate_examples(parts[0], parts[2]),
            "test": self._generate_examples(parts[1], parts[3]),
        }

    def _generate_examples(
        self, images: np.ndarray, labels: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield key, {"image": image, "label": int(label)}
