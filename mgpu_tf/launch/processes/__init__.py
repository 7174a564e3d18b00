"""Processes of this machine: tasks, and spares that wait to become one."""
