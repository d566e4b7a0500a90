"""Our own passes, one idea a file."""
