"""Start ranks, find a ComfyUI, demo, doctor, status, check: the command line."""
