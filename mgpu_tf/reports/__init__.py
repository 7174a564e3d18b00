"""What a run reports: its report, goodput, profile, scaling table, figures.

    from mgpu_tf.reports.report import Report
    from mgpu_tf.reports.scaling import ScalingTable
    from mgpu_tf.reports.terminal import show

    show(Report.read("runs/cnn"))                     # tables on the terminal
    print(ScalingTable.read("runs/scaling/scaling.json").text())

`report` and `scaling` are values with a JSON form, `goodput` measures where
the time of a run goes, `profiling` traces steps for xprof. `terminal`
and `figures` show the values to people.
"""
