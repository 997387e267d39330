"""One operation a file: an eager reference, fast backends, and the rule that picks one."""
