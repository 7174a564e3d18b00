"""Which worker does which piece of an epoch, and when."""
