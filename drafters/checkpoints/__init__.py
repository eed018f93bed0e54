"""Published EAGLE-3 checkpoints in, and ours out.

``files`` reads a directory, ``layouts`` turns each published config.json into one set of facts, ``load``
checks and assembles, ``save`` writes our own format and exports the published ones.
"""
