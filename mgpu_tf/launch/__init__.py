"""Starting the processes of a cluster. No module here imports TensorFlow."""
