"""Generated images, encoded as JPEG: work for the input pipeline.

    --dataset=images        64 x 64 pixels
    --dataset=images/224    224 x 224 pixels

1,024 images to train and 256 to test, in ten classes: stripes whose
direction and width tell the class, with noise, in a random color.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from mgpu_tf.errors import ConfigurationError

CLASSES = 10
_SIZES = {"train": 1_024, "test": 256}
_SMALLEST, _LARGEST = 16, 1024


class Images(tfds.core.GeneratorBasedBuilder):
    """Builder of the set; nothing is downloaded."""

    VERSION = tfds.core.Version("1.0.0")
    # TFDS warns of a configuration that the class does not list.
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(name=str(side))
        for side in range(_SMALLEST, _LARGEST + 1)
    ]
    NUM_SHARDS = 8
    IN_MEMORY = False
    SCALE = 255.0

    def __init__(self, *, side: int = 64, **options: Any) -> None:
        self._side = side
        super().__init__(config=str(side), **options)

    @classmethod
    def options_of(cls, name: str) -> dict[str, Any]:
        """Returns the options of the builder for `images` or `images/224`."""
        return {"side": side_of(name)}

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Generated stripes with ten classes.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(
                        shape=(self._side, self._side, 3),
                        encoding_format="jpeg",
                    ),
                    "label": tfds.features.ClassLabel(num_classes=CLASSES),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager
        return {split: self._generate_examples(split) for split in _SIZES}

    def _generate_examples(
        self, split: str
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        generator = np.random.default_rng(list(_SIZES).index(split))
        rows, columns = np.mgrid[: self._side, : self._side] / self._side
        for key in range(_SIZES[split]):
            label = key % CLASSES
            angle = np.pi * (label % 5) / 5
            wave = rows * np.cos(angle) + columns * np.sin(angle)
            waves = 3 + 4 * (label // 5)
            phase = generator.uniform(0, 2 * np.pi)
            stripes = 0.5 + 0.5 * np.sin(2 * np.pi * waves * wave + phase)
            color = generator.uniform(0.3, 1.0, size=3)
            noise = generator.normal(0, 0.05, size=(*stripes.shape, 3))
            image = np.clip(stripes[..., None] * color + noise, 0, 1) * 255
            yield key, {"image": image.astype(np.uint8), "label": label}


def side_of(name: str) -> int:
    """Returns the side in pixels that `images` or `images/224` asks for.

    Args:
        name: The name of the set.

    Returns:
        The side.

    Raises:
        ConfigurationError: What stands behind the stroke is no side.
    """
    _, stroke, text = name.partition("/")
    if not stroke:
        return 64
    if not text.isdecimal() or not _SMALLEST <= int(text) <= _LARGEST:
        raise ConfigurationError(
            f"images/SIDE takes a side of {_SMALLEST} to {_LARGEST} pixels. "
            f"Received: {name!r}. Write such as images/224."
        )
    return int(text)
