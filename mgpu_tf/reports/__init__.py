"""What a run tells: its report, goodput, profile, scaling table, figures.

report.Report           what a run did, as JSON
goodput.Meter           where the time of a run has gone
profiling.Profiler      a trace for TensorBoard
scaling.ScalingTable    throughput against devices
terminal, figures       the same for people
"""
