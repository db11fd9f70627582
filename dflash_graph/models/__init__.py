"""Models declare graphs and nothing else: no bytes, no devices, no launch parameters."""
