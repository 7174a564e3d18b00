"""Models by name, and what is done to models made by others.

model = models.create_model("resnet/20", (32, 32, 3), 10, "adam")
"""

from mgpu_tf.models.zoo import create_model

__all__ = ["create_model"]
