"""Measurements of a user's own model: parity and throughput.

    strategy = mgpu_tf.create_mirrored_strategy(num_virtual_devices=3)
    report = mgpu_tf.check_parity(build_model, (x, y), [strategy], steps=10)
    report.same
    print(report)

`parity` compares runs that `trajectory` records, `verdict` separates rounding
from a difference, `causes` names what makes a model differ. `benchmark`
measures throughput against devices.
"""
