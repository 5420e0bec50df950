"""Bridges to other libraries, each behind its extra; nothing outside this folder may import them."""
