"""Training with parameter servers: workers that do not wait for each other.

engine    what the trainer talks to
work      what is handed out, as row numbers or names of shares
dispatch  hands it out
piece     what a worker does with it
update    applies gradients on the servers
"""
