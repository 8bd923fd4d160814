"""Files in the released layout, and what is needed to read, write, check and make them."""
