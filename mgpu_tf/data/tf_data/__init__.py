"""What is known of a `tf.data.Dataset` from its graph."""
