"""The sub-commands of the command line, one file a group; parsing and printing only."""
