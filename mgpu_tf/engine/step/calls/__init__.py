"""Calls of layers and models: inside, a replica has its rows."""
