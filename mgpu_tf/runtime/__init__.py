"""TensorFlow in this process: devices, threads, how it is imported.

    from mgpu_tf.runtime import determinism, devices

    devices.select_local(None, num_virtual_devices=2)   # two CPU replicas
    determinism.enable_determinism()                    # bits that repeat
    determinism.threads()                               # {"intra_op": 2, ...}

`quiet_import` imports TensorFlow without what it prints about missing devices.
`versions` refuses a TensorFlow or Keras that the package does not run with.
"""
