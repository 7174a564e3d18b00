"""What TensorFlow runs on each device, after it has placed operations."""

import collections

from tensorflow.python.eager import context


def graphs_of(run):
    """Calls a function; returns the nodes that ran, by name of the device.

    Args:
        run: Calls a `tf.function` that no one has called yet.
    """
    context.enable_run_metadata()
    try:
        run()
        graphs = context.export_run_metadata().partition_graphs
    finally:
        context.disable_run_metadata()
    found = collections.defaultdict(list)
    for graph in graphs:
        for node in graph.node:
            if node.device:
                found[node.device.split("/")[-1][-5:]].append(node)
    return found
