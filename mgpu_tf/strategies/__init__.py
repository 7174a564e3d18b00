"""Strategies: made by name, and what the rest of the package asks of one.

from mgpu_tf.strategies import registry

strategy = registry.create_strategy("mirrored", num_virtual_devices=3)
registry.kind_of(strategy).name                       # "mirrored"
topology = registry.topology_of(strategy)
topology.num_workers, topology.data_parallel_degree   # 1, 3
topology.local.rows_of(size=64, replica=0)            # (0, 21)

registry           one row for each kind
topology           where this process stands
synchronous        factories of the strategies that step together
parameter_server   the coordinator's strategy; servers: who serves it
peers              what workers tell each other beside their steps
"""
