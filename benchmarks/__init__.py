"""How fast is a push? Programs that measure; ``python -m benchmarks.push`` is the first one to run."""
