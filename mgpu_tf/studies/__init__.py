"""Measurements of a user's own model: parity and throughput.

report = mgpu_tf.check_parity(build_model, data, ["mirrored"], steps=10)
print(report)
"""
