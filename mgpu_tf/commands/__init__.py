"""The commands of `mgpu-tf`, a module each.

    values = flags.FlagValues()
    plan.define(values)                  # the flags of the command
    rest = values(["mgpu-tf", "--num_parameters=25.6M"])[1:]
    status = plan.run(Call("plan", [], values, rest, None))
    print(plan.USAGE)                    # the first part of its help

`mgpu_tf.cli` finds the module, parses the flags and tells mistakes in one
line. `arguments` is what commands share.
"""
