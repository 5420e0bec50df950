"""How bytes move: tensors, sockets, addresses and deadlines. Knows no scheme, no collector, no Lightning."""
