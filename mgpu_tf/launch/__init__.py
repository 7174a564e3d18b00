"""Starting the processes of a cluster. No module here imports TensorFlow.

    from mgpu_tf.launch import local
    from mgpu_tf.launch.policy import RestartPolicy

    status = local.launch(
        ["python", "train.py"], 2, policy=RestartPolicy(max_restarts=3)
    )

`job` is what every launcher receives: the command, its tasks, what they are
told. `local` starts and supervises them on this machine, `process` is one of
them, `policy` says what is started again, and `guard` ends them if the
supervisor dies.

`hosts` has the commands for machines without a scheduler. `slurm` and
`kubernetes` make the text that a scheduler gets, `yaml_text` writes
manifests.
"""
