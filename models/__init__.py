"""The networks, in plain PyTorch."""
