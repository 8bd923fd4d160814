"""Training of the miniature checkpoint; a program beside the runtime, not part of the installed packages."""
