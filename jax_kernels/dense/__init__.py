"""What works on channels alone."""
