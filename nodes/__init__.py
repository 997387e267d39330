"""What a ComfyUI user sees; the only room that imports ComfyUI."""
