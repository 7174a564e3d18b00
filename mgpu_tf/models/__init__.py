"""Models by name, and what is done to models made by others.

    from mgpu_tf import models

    model = models.create_model("resnet/20", (32, 32, 3), num_classes=10)
    model.compile("sgd", "sparse_categorical_crossentropy")

`zoo` makes the models, `normalization` synchronizes BatchNormalization.
"""

from mgpu_tf.models.zoo import create_model

__all__ = ["create_model"]
