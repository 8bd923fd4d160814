"""Pages beyond the device: what their bytes are, where they are kept, and how requests get them back."""
