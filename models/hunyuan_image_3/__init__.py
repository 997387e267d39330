"""HunyuanImage-3.0: configuration, sharding, trunk, pictures, text, denoise, and the operations that nodes call."""
