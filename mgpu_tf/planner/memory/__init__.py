"""The memory that a training takes on each device."""
