"""What the command line runs, one file a command."""
