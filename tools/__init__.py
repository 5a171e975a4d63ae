"""Programs around train.py. A package, so that no installed `tools` comes before it."""
