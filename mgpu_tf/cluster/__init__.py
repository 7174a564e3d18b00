"""Which cluster this process belongs to; no module imports TensorFlow.

    from mgpu_tf.cluster import ports
    from mgpu_tf.cluster.config import ClusterConfig

    cluster = ClusterConfig.from_environment()        # None: a single process
    if cluster is not None:
        cluster.num_workers, cluster.worker_index, cluster.is_chief
        ports.answers(cluster.address)                # False before it serves

`config` has the tasks and this task among them, from `TF_CONFIG` or from the
scheduler that `environments` finds: `slurm`, `kubernetes`, `skypilot`. `roles`
says which processes of a scheduler become which tasks. `ports` finds free ports
and asks whether an address answers, `waiting` names the tasks that are waited
for.
"""
