"""Which cluster this process belongs to; no module imports TensorFlow.

    from mgpu_tf.cluster import ports
    from mgpu_tf.cluster.config import ClusterConfig

    cluster = ClusterConfig.from_environment()        # TF_CONFIG, or None
    if cluster is not None:
        cluster.num_workers, cluster.worker_index, cluster.is_chief
        ports.answers(cluster.address)                # False before it serves

`config` has the tasks and this task among them, `ports` finds free ports and
asks whether an address answers, `waiting` names the tasks that are waited for.
"""
