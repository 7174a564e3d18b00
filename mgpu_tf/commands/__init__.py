"""The commands of `mgpu-tf`, a module each.

define(values)      the flags of the command
USAGE               its help
run(values)         does it and returns the exit status
"""
