"""Which cluster this process belongs to; no module imports TensorFlow.

from mgpu_tf.cluster.config import ClusterConfig

cluster = ClusterConfig.from_environment()     # TF_CONFIG, or None
cluster.num_workers, cluster.worker_index, cluster.is_chief

config    the tasks and this task among them
ports     free ports, and whether an address answers
waiting   names the tasks that are waited for
"""
