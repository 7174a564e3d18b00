"""Benchmarks against peers, each contestant in processes of its own."""
