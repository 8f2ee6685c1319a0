"""The network: attention, layers, stacks and heads."""
