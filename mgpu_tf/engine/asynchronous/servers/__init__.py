"""What parameter servers hold, and how workers read and change it."""
