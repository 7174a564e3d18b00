"""Distributed training for Keras 3 on TensorFlow."""
