"""Who receives: worker processes, environments and batches. Knows no callback, no Lightning, no Hydra."""
