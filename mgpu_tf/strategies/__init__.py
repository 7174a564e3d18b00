"""Strategies: made by name, and what the rest of the package asks of one.

    from mgpu_tf.strategies import registry

    strategy = registry.create_strategy("mirrored", num_virtual_devices=3)
    registry.kind_of(strategy).name                       # "mirrored"
    topology = registry.topology_of(strategy)
    topology.num_workers, topology.data_parallel_degree   # 1, 3
    topology.local.rows_of(size=64, replica=0)            # (0, 21)

`registry` has one row for each kind, `topology` says which replicas this
process has. `synchronous` and `parameter_server` have the factories, `servers`
the processes that serve a coordinator. `peers` is what workers send each other
outside their steps, by `calls` and `messages`. `collectives` and `own_gradient`
are what replicas send each other within them, and its gradients.
"""

from mgpu_tf.runtime import versions

# All that trains goes through here, before a private name of Keras is used.
versions.check()
