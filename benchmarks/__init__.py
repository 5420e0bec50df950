"""What does it cost, and does it last? Programs that measure, one for each such question.

``python -m benchmarks.push`` is the first one to run; each says in its first lines what it asks, and how.
"""
