"""The subcommands of ``lightning-weightsync``, one module each; only these and ``cli`` import hydra."""
