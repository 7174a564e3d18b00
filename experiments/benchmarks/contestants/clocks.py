"""The clocks that a contestant may be timed by."""

import time

# "processor" is the time that all threads of this process have had, which
# other work on the machine does not lengthen much.
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
