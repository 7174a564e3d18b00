"""Starting the processes of a cluster. No module here imports TensorFlow.

    from mgpu_tf.launch import local
    from mgpu_tf.launch.policy import RestartPolicy

    status = local.launch(
        ["python", "train.py"], 2, policy=RestartPolicy(max_restarts=3)
    )

`job` is what every launcher receives: the command, its tasks, and their
environment. `local` supervises them, `process` is one of them, `policy` says
what is started again, and `guard` ends them if the supervisor dies. `machines`
says where they run: on this machine, or by `ssh` or `ray` on others, where a
`keeper` holds each. `notebook` starts them from a cell; there `called` is what
each of them runs.

`hosts` has the commands for machines without a scheduler. `slurm`,
`kubernetes` and `dockerfile` make the text that a scheduler or Docker gets,
`yaml_text` writes manifests.
"""
