"""Reusable Hydra groups (YAML only), reached by `hydra.searchpath: [pkg://lightning_weightsync.configs]`."""
